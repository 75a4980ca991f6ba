"""How much host memory a rank may take if nobody says: it bounds the host pool, where a tensor's copies go."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")


def share_bytes() -> int:
    """This rank's share of half of the memory that is available now, by the system and by the cgroups of this process.

    Ranks on this node: ``LOCAL_WORLD_SIZE``, else ``LOCAL_SIZE``, else 1.
    """
    available = min([int(psutil.virtual_memory().available), *cgroup_rooms()])
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    return available // 2 // max(ranks, 1)


def cgroup_rooms(root: Path = Path("/")) -> list[int]:
    """Bytes left in each limited cgroup (v1 and v2) above this process, as far as it can be read under ``root``.

    File cache that is not in use counts as left: the kernel gives it up on demand.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit_name, usage_name, cache_name = V1 if controllers else V2
        group = Path(path.lstrip("/"))
        for directory in (group, *group.parents):  # in a container the group's own path may not be there, its root is
            here = root / "sys/fs/cgroup" / mount / directory
            try:
                limit = int((here / limit_name).read_text())  # "max" is no number: no limit
                usage = int((here / usage_name).read_text())
                fields = dict(field.split() for field in (here / "memory.stat").read_text().splitlines())
                rooms.append(max(0, limit - usage + int(fields.get(cache_name, 0))))
            except (OSError, ValueError):
                continue
    return rooms
