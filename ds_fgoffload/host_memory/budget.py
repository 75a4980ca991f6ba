"""What the host pool may hold: this rank's limit, the sum over the node, and what the system has left just now.

The pool's next slab must fit within all three. What the system has left is read from its available memory and from the
limits of the process's cgroups, the sum over the node from :mod:`~ds_fgoffload.host_memory.node_ledger`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.host_memory.node_ledger import Ledger, LedgerBusyError, LedgerError, NodeEntry

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


@dataclass(frozen=True)
class HostPoolSettings:
    """What the user decides about the pool. Raises ``OffloadConfigError`` for a negative size or time."""

    max_bytes: int | None = None
    """Most bytes held from the system, free ones included. ``None``: this rank's share of half of what is available,
    and what the other ranks of the node leave of theirs."""
    pin_memory: bool = True
    """Whether slabs are page-locked. Pageable memory is several times slower to copy, and the copies block the host."""
    node_max_bytes: int | None = None
    """Most bytes held by all pools of this user on the node. ``None``: half of what is available if ``max_bytes`` is
    unset too, else no bound."""
    on_pin_failure: Literal["pageable", "keep"] = "pageable"
    """If the system refuses to page-lock: take pageable memory, or lend nothing."""
    preallocate_bytes: int = 0
    """So much is taken in the background as soon as there is a user."""
    idle_trim_s: float | None = None
    """Free slabs are given back when nothing has been on lease for so many seconds. ``None``: never by themselves."""

    def __post_init__(self) -> None:
        for key in ("max_bytes", "node_max_bytes", "preallocate_bytes", "idle_trim_s"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise OffloadConfigError(f"host_pool.{key} is {value}, less than 0: give more, or leave it unset")


class Refusal(NamedTuple):
    """Why no memory was taken, and what to do."""

    cause: str
    remedy: str


POOL_IS_FULL = "the host pool is full"


class Budget:
    """The bounds of one pool, and its row in the ledger. Not thread-safe, but its figures may be read at any time.

    ``ledger`` is where the pools of the node tell each other what they hold; ``None`` for a pool on its own, which
    takes its share and borrows nothing.
    """

    def __init__(self, settings: HostPoolSettings, ledger: Ledger | None) -> None:
        self.limit_bytes = 0
        """What this pool may hold at most."""
        self.share_bytes = 0
        """What it may always hold; beyond it, it borrows."""
        self.ahead_bytes = 0
        """What may be taken before it is needed: the share, or less where the ranks' shares are more than there is."""
        self.full = Refusal(POOL_IS_FULL, "raise its bound or offload less")
        """What is said at the limit; it names the bound that this is."""
        self._ledger = ledger
        self._node_limit_bytes: int | None = None
        self._most_share_bytes = 0
        self.set(settings, held_bytes=0)

    def set(self, settings: HostPoolSettings, held_bytes: int) -> str:
        """Works out the bounds from the settings and from what there is now; returns how, in words."""
        now, others = room(), self._others()
        others_bytes = sum(row.pinned_bytes for row in others)
        ranks = max(local_ranks(), len(others) + 1)
        most, node = settings.max_bytes, settings.node_max_bytes
        if most is None and node is None:
            node = (now.left_bytes + held_bytes + others_bytes) // 2
        lock = memlock_bytes() if settings.pin_memory and locks_through_mlock() else None
        bounds = [bound for bound in (most, node, lock if most is None else None) if bound is not None]
        self._node_limit_bytes, self._most_share_bytes = node, min(bounds)
        self._share_among(ranks)
        self.limit_bytes = min(bounds) if self._ledger is not None else self.share_bytes
        whole = now.usable_bytes + held_bytes + others_bytes
        safe = self.share_bytes * ranks <= whole
        self.ahead_bytes = self.share_bytes if safe else min(self.share_bytes, whole // 2 // ranks)
        self.full = Refusal(POOL_IS_FULL, f"{self._raise_bound(settings, lock)} or offload less")
        share, limit = self.share_bytes, self.limit_bytes
        locked = "" if lock is None else f"; ulimit -l is {mib(lock)}"
        return (
            f"this rank's share of host memory is {mib(share)}, and {mib(limit)} with what others leave: "
            f"{mib(now.left_bytes)} of {mib(now.total_bytes)} are left to {now.bound_by}, of which half is taken at "
            f"most, by {ranks} ranks or pools on this node{locked}"
        )

    def less_ahead(self, asked_bytes: int) -> str | None:
        """What to say if more is to be preallocated than is taken ahead of need."""
        if asked_bytes <= self.ahead_bytes:
            return None
        return (
            f"host_pool.preallocate_bytes is {mib(asked_bytes)}, but no more than {mib(self.ahead_bytes)} are taken "
            "ahead of need: this rank's share of the pool's bound and of the memory that is left; lower it to that"
        )

    def claim(self, held_bytes: int, slab_bytes: int) -> Refusal | None:
        """A slab within the limit, before it is taken: writes it into the ledger, or says why not."""
        now = room()
        if slab_bytes > now.usable_bytes:
            left = f"only {mib(now.left_bytes)} of {mib(now.total_bytes)} are left to {now.bound_by}"
            remedy = "free host memory, raise the memory limit of the container or job, or offload less"
            return Refusal(f"{POOL_IS_FULL}: {left}", remedy)
        if self._ledger is None:
            return None
        try:
            others_bytes = self._ledger.hold(held_bytes + slab_bytes, self._node_limit_bytes)
        except LedgerError as error:
            # Without a ledger nobody borrows, and shares are safe. While it is busy, others may have borrowed ours.
            if held_bytes + slab_bytes <= self.share_bytes and not isinstance(error, LedgerBusyError):
                return None
            return Refusal(f"{POOL_IS_FULL}: it borrows no more without a ledger ({error})", "free that file")
        if others_bytes is None:
            return None
        assert self._node_limit_bytes is not None
        others = f"the other pools of the node hold {mib(others_bytes)} of {mib(self._node_limit_bytes)} for all"
        return Refusal(f"{POOL_IS_FULL}: {others}", "raise host_pool.node_max_bytes or offload less")

    def holds(self, held_bytes: int) -> None:
        """Writes into the ledger what is held now, after something was given back or refused."""
        if self._ledger is not None:
            with contextlib.suppress(LedgerError):  # until it is told, others take less than they might
                self._ledger.hold(held_bytes)

    def publish(self, held_bytes: int, leased_bytes: int) -> bool:
        """Tells the node what is on lease; returns whether someone wants back what this pool borrows."""
        if self._ledger is None:
            return False
        try:
            others = self._ledger.publish(leased_bytes)
        except LedgerError:
            return False
        self._share_among(max(local_ranks(), len(others) + 1))  # more may have come
        return held_bytes > self.share_bytes and any(row.wanted_bytes for row in others)

    def leave(self) -> None:
        """Takes this pool out of the ledger; it comes back with its next slab."""
        if self._ledger is not None:
            self._ledger.leave()

    def _raise_bound(self, settings: HostPoolSettings, lock: int | None) -> str:
        """What lets this pool hold more than :attr:`limit_bytes`."""
        if settings.max_bytes is None and lock is not None and self.limit_bytes == lock:
            return "raise the limit of locked memory (ulimit -l)"
        if settings.node_max_bytes is not None and self.limit_bytes != settings.max_bytes:
            return "raise host_pool.node_max_bytes"
        return "raise host_pool.max_bytes"

    def _share_among(self, ranks: int) -> None:
        node, most = self._node_limit_bytes, self._most_share_bytes
        self.share_bytes = most if node is None else min(node // ranks, most)
        if self._ledger is not None:
            self._ledger.describe(limit_bytes=self.limit_bytes, share_bytes=self.share_bytes)

    def _others(self) -> list[NodeEntry]:
        if self._ledger is not None:
            with contextlib.suppress(LedgerError):
                return self._ledger.others()
        return []


def mib(size_bytes: int) -> str:
    """``size_bytes`` for a message."""
    return f"{size_bytes} bytes ({size_bytes / 2**20:.1f} MiB)"
