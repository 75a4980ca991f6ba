"""The arithmetic under the host pool, as tables: what is free, which slab comes next, how much a rank may take."""

import types

import pytest

from ds_fgoffload import host_limit
from ds_fgoffload.arena import Arena, Range, slab_sizes
from ds_fgoffload.host_limit import cgroup_rooms, share_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def arena_of(*slabs):
    arena = Arena(merge=lambda marks: tuple(sorted(set(marks))))
    for size in slabs:
        arena.add_slab(size)
    return arena


def layout(arena):
    return [(free.start, free.end, free.marks) for free in arena.free_ranges()]


@pytest.mark.parametrize(
    ("freed", "size", "start"),
    [
        # ten blocks of ten bytes are taken; those between these addresses are free again
        ([(0, 30), (50, 60), (80, 100)], 10, 50),  # what fits exactly before what is larger
        ([(0, 30), (80, 100)], 10, 80),  # the smallest that fits, though it is higher up
        ([(0, 30), (80, 100)], 25, 0),
        ([(20, 30), (50, 60)], 10, 20),  # of equals the lowest
        ([(50, 60), (20, 30)], 10, 20),  # in whatever order they were freed
        ([(0, 30)], 31, None),
        ([], 1, None),
    ],
)
def test_takes_the_best_fit(freed, size, start):
    arena = arena_of(100)
    blocks = {block.start: block for block in [arena.take(10) for _ in range(10)]}
    for low, high in freed:
        for address in range(low, high, 10):
            arena.put(blocks[address], ())
    expected = None if start is None else Range(0, start, start + size, ())
    assert arena.take(size) == expected


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_joins_neighbours_and_their_marks_in_any_order(order):
    arena = arena_of(30)
    blocks = [arena.take(10) for _ in range(3)]
    for index in order:
        arena.put(blocks[index], (f"use {index}",))
    assert layout(arena) == [(0, 30, ("use 0", "use 1", "use 2"))]


def test_carves_with_marks_and_keeps_them_on_the_rest():
    arena = arena_of(100)
    arena.put(arena.take(100), ("a", "b"))
    assert arena.take(30) == Range(0, 0, 30, ("a", "b"))
    assert layout(arena) == [(30, 100, ("a", "b"))]


def test_keeps_the_marks_that_a_block_was_taken_with():
    arena = arena_of(10)
    arena.put(arena.take(10), ("first",))
    arena.put(arena.take(10), ("second",))
    assert layout(arena) == [(0, 10, ("first", "second"))]


def test_never_joins_slabs_and_removes_only_empty_ones():
    arena = arena_of(10, 10)
    low, high = arena.take(10), arena.take(10)
    assert (low.slab, high.slab) == (0, 11)
    assert arena.empty_slabs() == []
    arena.put(low, ())
    assert arena.empty_slabs() == [Range(0, 0, 10, ())]
    arena.put(high, ())
    assert layout(arena) == [(0, 10, ()), (11, 21, ())]
    arena.take(4)
    assert arena.empty_slabs() == [Range(11, 11, 21, ())]
    arena.remove_slab(11)
    assert layout(arena) == [(4, 10, ())]
    assert arena.take(10) is None


def test_does_not_use_an_address_again():
    arena = arena_of(10)
    arena.remove_slab(0)
    assert arena.add_slab(10) == 11


@pytest.mark.parametrize(
    ("size", "held", "limit", "sizes"),
    [
        (1, 0, 64 * GIB, [256 * MIB, 512]),
        (200 * MIB, 0, 64 * GIB, [256 * MIB]),  # no second attempt of the same size
        (300 * MIB, 0, 64 * GIB, [512 * MIB]),
        (5 * GIB, 0, 64 * GIB, [8 * GIB]),  # a block may be larger than the largest slab
        (MIB, 1 * GIB, 64 * GIB, [256 * MIB, MIB]),  # a quarter of what is held
        (MIB, 1 * GIB + 512, 64 * GIB, [512 * MIB, MIB]),
        (MIB, 40 * GIB, 64 * GIB, [4 * GIB, MIB]),  # but no more than the largest slab
        (MIB, 63 * GIB, 64 * GIB, [1 * GIB, MIB]),  # the limit halves it
        (MIB, 64 * GIB - 3 * MIB, 64 * GIB, [2 * MIB, MIB]),
        (3 * MIB, 64 * GIB - 3 * MIB, 64 * GIB, [3 * MIB]),  # no power of two is left, but enough
        (3 * MIB, 0, 3 * MIB + 511, [3 * MIB]),  # rounded down to the alignment
        (3 * MIB + 1, 0, 3 * MIB + 511, []),
        (MIB, 64 * GIB, 64 * GIB, []),
        (MIB, 64 * GIB, 1 * GIB, []),  # the limit was lowered
        (1, 0, 511, []),
        (1, 0, 0, []),
    ],
)
def test_slab_sizes(size, held, limit, sizes):
    assert slab_sizes(size, least=256 * MIB, held=held, limit=limit) == sizes


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
    assert cgroup_rooms(tmp_path) == rooms


@pytest.mark.parametrize(
    ("environment", "available", "rooms", "share"),
    [
        ({}, 800, [], 400),
        ({}, 800, [900, 100, 300], 50),
        ({"LOCAL_WORLD_SIZE": "8"}, 800, [], 50),
        ({"LOCAL_SIZE": "4"}, 800, [], 100),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, 800, [], 50),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "0"}, 800, [], 400),
    ],
)
def test_share_of_what_is_available(monkeypatch, environment, available, rooms, share):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host_limit.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=available))
    monkeypatch.setattr(host_limit, "cgroup_rooms", lambda: rooms)
    assert share_bytes() == share
