"""Which ranges of the host pool's memory are free: best fit, coalescing, and what clings to a range (its last uses).

Pure arithmetic on addresses, the bottom of the host pool: a tensor's block is taken here before its copy to the host
and put back when its last view has died. Slabs of one region lie side by side, and a block may reach from one into the
next; between regions there is a gap::

    region A                                        region B
    |- slab -|----- slab -----|-- slab --|          |----- slab -----|
    |--- taken ---|   free    |- taken --|     .    |      free      |
                  start       end
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Mark = TypeVar("Mark")

START_BITS = 64
START_MASK = (1 << START_BITS) - 1

ALIGNMENT_BYTES = 512
"""Blocks are multiples of it."""
LARGEST_SLAB_BYTES = 1 << 30
"""The largest slab, unless one block needs more: whoever waits for the system waits for one slab."""
GROWTH_DIVISOR = 64
"""A slab is at least this fraction of what is held, so that slabs are few and little is held too much."""


class Range(NamedTuple, Generic[Mark]):
    """Bytes ``start`` to ``end`` of the region that begins at ``region``, and the marks of what used them last."""

    region: int
    start: int
    end: int
    marks: tuple[Mark, ...]


class FreeRanges(Generic[Mark]):
    """Free ranges. Not thread-safe.

    ``merge`` joins the marks of ranges that become one. A range that is carved from a bigger one has all marks of the
    bigger one, and so has what remains: marks may be too many, never too few.
    """

    def __init__(self, merge: Callable[[tuple[Mark, ...]], tuple[Mark, ...]]) -> None:
        self._merge = merge
        self._by_start: dict[int, Range[Mark]] = {}
        self._by_end: dict[int, Range[Mark]] = {}
        # A plain sorted list: with some thousand ranges, moving its tail is cheaper than any tree in Python.
        self._by_size: list[int] = []  # size and start in one number, which compares faster than a pair

    def add(self, region: int, start: int, end: int) -> None:
        """Adds free bytes that no one has used."""
        self.put(Range(region, start, end, ()), ())

    def take(self, size: int) -> Range[Mark] | None:
        """Takes ``size`` (> 0) bytes from the smallest range that fits, of equals the lowest; ``None`` if none fits."""
        index = bisect_left(self._by_size, size << START_BITS)
        if index == len(self._by_size):
            return None
        start = self._by_size.pop(index) & START_MASK
        region, _, end, marks = free = self._by_start.pop(start)
        del self._by_end[end]
        middle = start + size
        if middle == end:
            return free
        self._insert(Range(region, middle, end, marks))
        return Range(region, start, middle, marks)

    def put(self, taken: Range[Mark], marks: tuple[Mark, ...]) -> None:
        """Frees ``taken``, with ``marks`` beside those it was taken with, and joins it with its free neighbours."""
        region, start, end, earlier = taken
        marks = earlier + marks
        before, after = self._by_end.get(start), self._by_start.get(end)
        if before is not None:
            self._remove(before)
            start = before.start
            marks += before.marks
        if after is not None:
            self._remove(after)
            end = after.end
            marks += after.marks
        self._insert(Range(region, start, end, self._merge(marks)))

    def cut(self, start: int, end: int) -> Range[Mark] | None:
        """Takes the bytes from ``start`` to ``end`` if they are free, all of them."""
        starts = sorted(self._by_start)
        index = bisect_right(starts, start) - 1
        if index < 0:
            return None
        free = self._by_start[starts[index]]
        if free.end < end:
            return None
        self._remove(free)
        if free.start < start:
            self._insert(free._replace(end=start))
        if end < free.end:
            self._insert(free._replace(start=end))
        return free._replace(start=start, end=end)

    def free_before(self, end: int) -> int:
        """How many bytes are free right before the address ``end``."""
        free = self._by_end.get(end)
        return 0 if free is None else free.end - free.start

    def by_address(self) -> list[Range[Mark]]:
        """All free ranges by address."""
        return [self._by_start[start] for start in sorted(self._by_start)]

    def _insert(self, free: Range[Mark]) -> None:
        self._by_start[free.start] = free
        self._by_end[free.end] = free
        insort(self._by_size, (free.end - free.start) << START_BITS | free.start)

    def _remove(self, free: Range[Mark]) -> None:
        del self._by_start[free.start]
        del self._by_end[free.end]
        del self._by_size[bisect_left(self._by_size, (free.end - free.start) << START_BITS | free.start)]


def slab_sizes(missing: int, *, least: int, page: int, held: int, limit: int) -> list[int]:
    """The slabs to ask the system for, in this order, so that ``missing`` bytes are added; empty beyond ``limit``.

    All are multiples of ``page``. The first is ``least`` or a fraction of ``held``, so that slabs are few where there
    are tens of GiB; the second is the smallest that will do, in case the system refuses the first.
    """
    left = (limit - held) // page * page
    smallest = rounded_up(missing, page)
    if smallest > left:
        return []
    step = min(held // GROWTH_DIVISOR, LARGEST_SLAB_BYTES)
    slab = min(rounded_up(max(missing, least, step), least), left)
    return [slab, smallest] if smallest < slab else [slab]


def rounded_up(size: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not less than ``size``."""
    return -(-size // unit) * unit
