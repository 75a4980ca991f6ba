"""The arithmetic under the host pool, as tables: what is free, and which slab comes next."""

import pytest

from ds_fgoffload.host_memory.free_ranges import FreeRanges, Range, slab_sizes

MIB, GIB = 1 << 20, 1 << 30


def free_ranges_of(*slabs):
    free_ranges = FreeRanges(merge=lambda marks: tuple(sorted(set(marks))))
    base = 0
    for size in slabs:  # each a region of its own
        free_ranges.add(base, base, base + size)
        base += size + 1
    return free_ranges


def layout(free_ranges):
    return [(free.start, free.end, free.marks) for free in free_ranges.by_address()]


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
    free_ranges = free_ranges_of(100)
    blocks = {block.start: block for block in [free_ranges.take(10) for _ in range(10)]}
    for low, high in freed:
        for address in range(low, high, 10):
            free_ranges.put(blocks[address], ())
    expected = None if start is None else Range(0, start, start + size, ())
    assert free_ranges.take(size) == expected


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_joins_neighbours_and_their_marks_in_any_order(order):
    free_ranges = free_ranges_of(30)
    blocks = [free_ranges.take(10) for _ in range(3)]
    for index in order:
        free_ranges.put(blocks[index], (f"use {index}",))
    assert layout(free_ranges) == [(0, 30, ("use 0", "use 1", "use 2"))]


def test_carves_with_marks_and_keeps_them_on_the_rest():
    free_ranges = free_ranges_of(100)
    free_ranges.put(free_ranges.take(100), ("a", "b"))
    assert free_ranges.take(30) == Range(0, 0, 30, ("a", "b"))
    assert layout(free_ranges) == [(30, 100, ("a", "b"))]


def test_keeps_the_marks_that_a_block_was_taken_with():
    free_ranges = free_ranges_of(10)
    free_ranges.put(free_ranges.take(10), ("first",))
    free_ranges.put(free_ranges.take(10), ("second",))
    assert layout(free_ranges) == [(0, 10, ("first", "second"))]


def test_never_joins_regions():
    free_ranges = free_ranges_of(10, 10)
    low, high = free_ranges.take(10), free_ranges.take(10)
    assert (low.region, high.region) == (0, 11)
    free_ranges.put(low, ())
    free_ranges.put(high, ())
    assert layout(free_ranges) == [(0, 10, ()), (11, 21, ())]


def test_joins_the_slabs_of_a_region_and_blocks_reach_across():
    free_ranges = free_ranges_of(10)
    assert (free_ranges.free_before(10), free_ranges.free_before(9)) == (10, 0)
    free_ranges.add(0, 10, 25)
    assert free_ranges.take(20) == Range(0, 0, 20, ())
    assert free_ranges.free_before(25) == 5


@pytest.mark.parametrize(
    ("span", "cut", "rest"),
    [
        ((10, 20), (10, 20), [(20, 30), (40, 50)]),
        ((15, 20), (15, 20), [(10, 15), (20, 30), (40, 50)]),
        ((20, 30), (20, 30), [(10, 20), (40, 50)]),
        ((10, 30), (10, 30), [(40, 50)]),
        ((0, 10), None, [(10, 30), (40, 50)]),
        ((5, 15), None, [(10, 30), (40, 50)]),
        ((25, 45), None, [(10, 30), (40, 50)]),
        ((30, 40), None, [(10, 30), (40, 50)]),
    ],
)
def test_cuts_what_is_wholly_free_with_its_marks(span, cut, rest):
    free_ranges = free_ranges_of(50)
    blocks = [free_ranges.take(10) for _ in range(5)]
    for index in (1, 2, 4):
        free_ranges.put(blocks[index], ("use",))
    found = free_ranges.cut(*span)
    assert found == (None if cut is None else Range(0, *cut, ("use",)))
    assert layout(free_ranges) == [(*span, ("use",)) for span in rest]


@pytest.mark.parametrize(
    ("missing", "held", "limit", "sizes"),
    [
        (1, 0, 64 * GIB, [16 * MIB, 2 * MIB]),
        (200 * MIB, 0, 64 * GIB, [208 * MIB, 200 * MIB]),
        (208 * MIB, 0, 64 * GIB, [208 * MIB]),  # no second attempt of the same size
        (5 * GIB, 0, 64 * GIB, [5 * GIB]),  # a block may be larger than the largest slab
        (MIB, 4 * GIB, 64 * GIB, [64 * MIB, 2 * MIB]),  # a fraction of what is held
        (MIB, 640 * GIB, 900 * GIB, [GIB, 2 * MIB]),  # but no more than the largest slab
        (3 * MIB, 64 * GIB - 6 * MIB, 64 * GIB, [6 * MIB, 4 * MIB]),  # all that is left
        (6 * MIB, 64 * GIB - 6 * MIB, 64 * GIB, [6 * MIB]),
        (6 * MIB + 1, 64 * GIB - 6 * MIB, 64 * GIB, []),
        (3 * MIB, 0, 4 * MIB - 1, []),  # whole pages only
        (MIB, 64 * GIB, 64 * GIB, []),
        (MIB, 64 * GIB, 1 * GIB, []),  # the limit was lowered
        (1, 0, 0, []),
    ],
)
def test_slab_sizes(missing, held, limit, sizes):
    assert slab_sizes(missing, least=16 * MIB, page=2 * MIB, held=held, limit=limit) == sizes
