"""How much host memory there is, by what the system and the cgroups say."""

import resource
import types

import pytest

from ds_fgoffload.host_memory import budget as host_limit
from ds_fgoffload.host_memory.budget import Room, cgroup_rooms, local_ranks, memlock_bytes, pin_remedy, room

MIB, GIB = 1 << 20, 1 << 30


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def group(directory, *, limit, usage, cache=0, v1=False):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    stat = f"cache 7\n{'total_' if v1 else ''}inactive_file {cache}\n"
    return {
        f"{directory}/{names[0]}": f"{limit}\n",
        f"{directory}/{names[1]}": f"{usage}\n",
        f"{directory}/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "rooms"),
    [
        ({}, []),
        ({"proc/self/cgroup": "0::/a/b\n", **group("sys/fs/cgroup/a/b", limit=100, usage=70, cache=20)}, [50]),
        ({"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", limit="max", usage=70)}, []),
        (  # a group is bound by those above it
            {
                "proc/self/cgroup": "0::/a/b\n",
                **group("sys/fs/cgroup/a/b", limit=100, usage=70),
                **group("sys/fs/cgroup/a", limit=80, usage=70),
            },
            [30, 10],
        ),
        # a container sees its own group at the root, whatever path the kernel names
        ({"proc/self/cgroup": "0::/docker/x\n", **group("sys/fs/cgroup", limit=100, usage=70)}, [30]),
        (
            {
                "proc/self/cgroup": "6:name=memory-watch:/b\n5:devices:/x\n4:cpu,memory:/a\n0::/\n",
                **group("sys/fs/cgroup/memory/a", limit=100, usage=40, cache=5, v1=True),
                **group("sys/fs/cgroup/memory/b", limit=1, usage=1, v1=True),
                **group("sys/fs/cgroup/x", limit=1, usage=1),
            },
            [65],
        ),
        ({"proc/self/cgroup": "0::/a\n", **group("sys/fs/cgroup/a", limit=100, usage=170)}, [0]),
    ],
)
def test_cgroup_rooms(tmp_path, files, rooms):
    write(tmp_path, files)
    found = cgroup_rooms(tmp_path)
    assert [room.left_bytes for room in found] == rooms
    assert {room.bound_by for room in found} <= {"the cgroup"}


@pytest.mark.parametrize(
    ("left", "total", "usable"),
    [(100, 160, 90), (5, 160, 0), (900 * GIB, 1000 * GIB, 899 * GIB), (GIB, 4 * GIB, 768 * MIB)],
)
def test_a_reserve_stays_with_the_system(left, total, usable):
    assert Room(left, total, "").usable_bytes == usable


@pytest.mark.parametrize(
    ("cgroups", "bound"),
    [
        ([], "the system"),
        ([Room(10, 100, "the cgroup")], "the cgroup"),
        ([Room(900, 9000, "the cgroup")], "the cgroup"),
        ([Room(900, 1000, "the cgroup")], "the system"),
    ],
)
def test_the_tightest_bound_counts(monkeypatch, cgroups, bound):
    memory = types.SimpleNamespace(available=800, total=1000)
    monkeypatch.setattr(host_limit.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host_limit, "cgroup_rooms", lambda: cgroups)
    assert room().bound_by == bound


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, 8),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "0"}, 1),
    ],
)
def test_ranks_of_the_node(monkeypatch, environment, ranks):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert local_ranks() == ranks


def test_the_remedy_names_what_can_be_seen(monkeypatch, tmp_path):
    write(tmp_path, {"proc/sys/kernel/osrelease": "5.15.0-microsoft-standard-WSL2"})
    monkeypatch.setattr(host_limit, "memlock_bytes", lambda: 65536)
    assert "ulimit -l is 65536 bytes" in pin_remedy(tmp_path)
    assert "WSL" in pin_remedy(tmp_path)
    monkeypatch.setattr(host_limit, "memlock_bytes", lambda: None)
    assert pin_remedy(tmp_path / "none") == "lower host_pool.max_bytes or free host memory"


@pytest.mark.parametrize(
    ("may_lock_any", "limit", "found"),
    [(True, 65536, None), (False, 65536, 65536), (False, resource.RLIM_INFINITY, None)],
)
def test_the_limit_of_locked_memory(monkeypatch, may_lock_any, limit, found):
    monkeypatch.setattr(host_limit, "_may_lock_any", lambda: may_lock_any)
    monkeypatch.setattr(host_limit.resource, "getrlimit", lambda kind: (limit, limit))
    assert memlock_bytes() == found
