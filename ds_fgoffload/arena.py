"""Which ranges of the host pool's slabs are free: best fit, coalescing, and what clings to a range (its last uses).

Pure arithmetic on addresses, the bottom of the host pool: a tensor's block is taken here before its copy to the host
and put back when its last view has died. Slabs get addresses of their own, with a gap between them::

    slab A                                slab B
    |--- taken ---|  free   |- taken -|   |         free          |
    base          start     end       .   base                    end
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Mark = TypeVar("Mark")

START_BITS = 64
START_MASK = (1 << START_BITS) - 1

ALIGNMENT_BYTES = 512
"""Slabs and blocks are multiples of it."""
LARGEST_SLAB_BYTES = 4 << 30
"""The largest slab, unless one block is larger."""


class Range(NamedTuple, Generic[Mark]):
    """Bytes ``start`` to ``end`` of the slab that begins at ``slab``, and the marks of whatever used them last."""

    slab: int
    start: int
    end: int
    marks: tuple[Mark, ...]


class Arena(Generic[Mark]):
    """Free ranges of slabs. Not thread-safe.

    ``merge`` joins the marks of ranges that become one. A range that is carved from a bigger one has all marks of the
    bigger one, and so has what remains: marks may be too many, never too few.
    """

    def __init__(self, merge: Callable[[tuple[Mark, ...]], tuple[Mark, ...]]) -> None:
        self._merge = merge
        self._slabs: dict[int, int] = {}  # base -> end
        self._by_start: dict[int, Range[Mark]] = {}
        self._by_end: dict[int, Range[Mark]] = {}
        # A plain sorted list: with some thousand ranges, moving its tail is cheaper than any tree in Python.
        self._by_size: list[int] = []  # size and start in one number, which compares faster than a pair
        self._next_base = 0

    def add_slab(self, size: int) -> int:
        """Adds ``size`` free bytes; returns their base address, which is never used again."""
        base, end = self._next_base, self._next_base + size
        self._next_base = end + 1  # the gap: a slab's end is never another's start, so nothing coalesces across them
        self._slabs[base] = end
        self._insert(Range(base, base, end, ()))
        return base

    def empty_slabs(self) -> list[Range[Mark]]:
        """The slabs from which nothing is taken, each as its one free range."""
        free = (self._by_start.get(base) for base in self._slabs)
        return [range_ for range_ in free if range_ is not None and range_.end == self._slabs[range_.slab]]

    def remove_slab(self, base: int) -> None:
        """Forgets a slab from which nothing is taken."""
        free = self._by_start[base]
        assert free.end == self._slabs[base], f"slab {base} is in use"
        self._remove(free)
        del self._slabs[base]

    def take(self, size: int) -> Range[Mark] | None:
        """Takes ``size`` (> 0) bytes from the smallest range that fits, of equals the lowest; ``None`` if none fits."""
        index = bisect_left(self._by_size, size << START_BITS)
        if index == len(self._by_size):
            return None
        start = self._by_size.pop(index) & START_MASK
        slab, _, end, marks = free = self._by_start.pop(start)
        del self._by_end[end]
        middle = start + size
        if middle == end:
            return free
        self._insert(Range(slab, middle, end, marks))
        return Range(slab, start, middle, marks)

    def put(self, taken: Range[Mark], marks: tuple[Mark, ...]) -> None:
        """Frees ``taken``, with ``marks`` beside those it was taken with, and joins it with its free neighbours."""
        slab, start, end, earlier = taken
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
        self._insert(Range(slab, start, end, self._merge(marks)))

    def free_ranges(self) -> list[Range[Mark]]:
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


def slab_sizes(size: int, *, least: int, held: int, limit: int) -> list[int]:
    """The slabs to ask the system for, in this order, so that ``size`` bytes fit; empty if ``limit`` forbids it.

    ``least`` is a power of two, ``held`` what all slabs have now. A slab is a power of two, since torch's pinned
    allocator rounds up to one and would waste the difference, and a quarter of ``held`` or more, so that slabs are few
    where there are tens of GiB. Only if no such slab is within the limit, all that is left up to the limit is asked
    for: pinning may then take up to twice that. The second size is the smallest that will do, in case the system
    refuses the first.
    """
    smallest = max(power_of_two(size), ALIGNMENT_BYTES)
    left = (limit - held) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    slab = max(smallest, least, min(power_of_two(held // 4), LARGEST_SLAB_BYTES))
    while slab > left and slab > smallest:
        slab //= 2
    if slab > left:
        return [left] if size <= left else []
    return [slab, smallest] if smallest < slab else [slab]


def power_of_two(size: int) -> int:
    """The least power of two that is not less than ``size``."""
    return 1 << max(size - 1, 0).bit_length()
