"""How much host memory there is to take: it bounds the host pool, where a tensor's copies go."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from pathlib import Path
from typing import NamedTuple

import psutil

V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")

RESERVE_FRACTION = 16
"""One part in so many stays with the system, whatever limit the user set."""
MOST_RESERVE_BYTES = 1 << 30


class Room(NamedTuple):
    """Memory that can be taken before the kernel ends a process; by the tightest of the bounds."""

    left_bytes: int
    total_bytes: int
    bound_by: str
    """``"the system"`` or ``"the cgroup"``."""

    @property
    def usable_bytes(self) -> int:
        """What is left without the reserve that everyone else on the machine needs."""
        return max(0, self.left_bytes - min(self.total_bytes // RESERVE_FRACTION, MOST_RESERVE_BYTES))


def room() -> Room:
    """What is left now, to the system and in the cgroups of this process."""
    memory = psutil.virtual_memory()
    rooms = [Room(int(memory.available), int(memory.total), "the system"), *cgroup_rooms()]
    return min(rooms, key=lambda one: one.usable_bytes)


def local_ranks() -> int:
    """Ranks on this node: ``LOCAL_WORLD_SIZE``, else ``LOCAL_SIZE``, else 1."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1), 1)


def memlock_bytes() -> int | None:
    """The limit of locked memory (``ulimit -l``), or ``None`` if there is none for this process."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY or _may_lock_any() else limit


def locks_through_mlock() -> bool:
    """Whether memory is page-locked by ``mlock``, which obeys ``ulimit -l``; drivers of GPUs pin without it."""
    return os.environ.get("DS_PIN_MEMORY_BACKEND", "").lower() == "native"


def pin_remedy(root: Path = Path("/")) -> str:
    """What to do if the system refuses to page-lock, by what can be seen of it."""
    remedies = []
    limit = memlock_bytes()
    if limit is not None:
        remedies.append(f"raise the limit of locked memory (ulimit -l is {limit} bytes; Docker: --ulimit memlock=-1)")
    try:
        kernel = (root / "proc/sys/kernel/osrelease").read_text()
    except OSError:
        kernel = ""
    if "microsoft" in kernel.lower():
        remedies.append("WSL pins only a part of its memory: give it more in .wslconfig")
    remedies.append("lower host_pool.max_bytes or free host memory")
    return ", or ".join(remedies)


def cgroup_rooms(root: Path = Path("/")) -> list[Room]:
    """What is left in each limited cgroup (v1 and v2) above this process, as far as it can be read under ``root``.

    File cache that is not in use counts as left: the kernel gives it up on demand.
    """
    rooms = []
    for here, (_, limit_name, usage_name, cache_name) in _cgroups(root):
        with contextlib.suppress(OSError, ValueError):
            limit = int((here / limit_name).read_text())  # "max" is no number: no limit
            usage = int((here / usage_name).read_text())
            fields = dict(field.split() for field in (here / "memory.stat").read_text().splitlines())
            rooms.append(Room(max(0, limit - usage + int(fields.get(cache_name, 0))), limit, "the cgroup"))
    return rooms


@functools.cache
def _cgroups(root: Path) -> list[tuple[Path, tuple[str, str, str, str]]]:
    """The folders of the groups, and what their files are called. They are looked for once: the pool asks in a step."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = V1 if controllers else V2
        group = Path(path.lstrip("/"))
        for directory in (group, *group.parents):  # in a container the group's own path may not be there, its root is
            here = root / "sys/fs/cgroup" / names[0] / directory
            if (here / names[1]).exists():
                found.append((here, names))
    return found


def _may_lock_any() -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> 14 & 1)  # CAP_IPC_LOCK
