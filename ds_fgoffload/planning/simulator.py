"""What a round would be like if other places were copied: the link simulated over a recorded round.

Copies go out in the order of the saves and come back in the order of need, each direction at the rate that was
measured. Times are milliseconds on the device, without the waits that offloading itself caused.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations, groupby
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from ds_fgoffload.profiling.profile import RoundProfile
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Site

SPARE_TIME_MS = 0.2
"""Between the end of a copy, as it is foreseen, and what relies on it."""
MOST_HALVINGS, FEWEST_HALVINGS = 12, 5
"""Of the range in which the least peak is looked for; fewer in long rounds, as below."""
MOST_PREFIXES, FEWEST_PREFIXES = 32, 4
"""Numbers of sites that are tried one by one: fewer in long rounds."""
SEARCHED_MOMENTS = 40_000
"""Moments of all rounds that are simulated to improve on that: some hundredths of a second, enough to search a small
round through."""


class Absence(NamedTuple):
    """From which position to which a place is not on the device."""

    begin: int
    end: int


@dataclass(frozen=True)
class Outcome:
    """What a simulation found. Candidates go by their numbers, in the order of their saves."""

    places: Sequence[Place]
    """Of all candidates."""
    left: Mapping[int, int]
    """Position from which a candidate is away."""
    back: Mapping[int, int]
    """Position at which the copy back of a chosen candidate begins, if it has left."""
    stalled_ms: float
    peak_bytes: int
    copied_bytes: int

    @property
    def release(self) -> dict[Place, int]:
        return {self.places[number]: position for number, position in self.left.items()}

    @property
    def reload(self) -> dict[Place, int]:
        return {self.places[number]: position for number, position in self.back.items()}

    @property
    def absences(self) -> dict[Place, Absence]:
        return {self.places[n]: Absence(position, self.back[n]) for n, position in self.left.items()}


class Round:
    """The recorded round, and what would become of it."""

    def __init__(self, profile: RoundProfile, caution: float) -> None:
        self.passed = profile.passed
        self.times_ms = [passed.at_ms for passed in self.passed]
        self.memory_bytes = [passed.memory_bytes for passed in self.passed]
        self.reads_ms = [passed.read_at_ms for passed in self.passed]
        self.spare_ms = SPARE_TIME_MS * caution
        self.positions: dict[Moment, int] = {}
        self.saved: dict[Place, int] = {}
        needed: dict[Place, int] = {}
        for position, (moment, _, size_bytes, *_) in enumerate(self.passed):
            self.positions[moment] = position
            if moment.kind is Kind.SAVED and size_bytes:
                self.saved.setdefault(moment.place, position)
            elif moment.kind is Kind.NEEDED:
                needed.setdefault(moment.place, position)
        self.places = [place for place in self.saved if place in needed]
        self.candidates: AbstractSet[int] = frozenset(range(len(self.places)))
        self.saved_at = [self.saved[place] for place in self.places]
        self.needed_at = [needed[place] for place in self.places]
        self.sizes_bytes = [self.passed[position].size_bytes for position in self.saved_at]
        self._d2h_ms = [size_bytes * caution / profile.d2h_bytes_per_ms for size_bytes in self.sizes_bytes]
        self._h2d_ms = [size_bytes * caution / profile.h2d_bytes_per_ms for size_bytes in self.sizes_bytes]
        self._by_ms = [self.times_ms[position] - self.spare_ms for position in self.needed_at]
        self._last_needed_first = sorted(self.candidates, key=self.needed_at.__getitem__, reverse=True)
        self._before_ms = [float("-inf"), *self.times_ms]  # when the moment before each came
        self._saves = [-1] * len(self.passed)
        for number, position in enumerate(self.saved_at):
            self._saves[position] = number
        self._next_read_ms = self._next_reads_ms()

    def _next_reads_ms(self) -> list[float]:
        """When the host goes on from the first read after each candidate's save."""
        next_ms, of_position = float("inf"), []
        for read_ms in reversed(self.reads_ms):
            of_position.append(next_ms)
            next_ms = next_ms if read_ms is None else read_ms
        of_position.reverse()
        return [of_position[position] for position in self.saved_at]

    def ranked(self, held: AbstractSet[Place]) -> list[int]:
        """What could be away for longest comes first; a site's places in all micro-batches are next to each other."""
        of_site: dict[Site, list[int]] = {}
        for number, place in enumerate(self.places):
            if place not in held:
                of_site.setdefault(place.site, []).append(number)

        def time_ms(site: Site) -> float:
            return fmean(self.times_ms[self.needed_at[n]] - self.times_ms[self.saved_at[n]] for n in of_site[site])

        return [number for site in sorted(of_site, key=time_ms, reverse=True) for number in of_site[site]]

    def lowest_peak(self, ranked: Sequence[int]) -> AbstractSet[int]:
        """What brings the peak down furthest without a wait.

        Not everything: what is copied takes the link from what could be away for longer. So it is the first of
        ``ranked`` up to some site, and of the sites after it those that the link has time for all the same.
        """
        sites = [list(numbers) for _, numbers in groupby(ranked, key=lambda number: self.places[number].site)]
        chosen: set[int] = set()
        best: AbstractSet[int] = frozenset()
        best_bytes, best_number = self.simulate(best).peak_bytes, 0
        prefixes = min(MOST_PREFIXES, max(FEWEST_PREFIXES, SEARCHED_MOMENTS // max(1, len(self.passed))))
        step = max(1, len(sites) // prefixes)
        for number in range(len(sites)):
            chosen.update(sites[number])
            if (number + 1) % step == 0 or number + 1 == len(sites):
                peak_bytes = self.simulate(chosen).peak_bytes
                if peak_bytes < best_bytes:
                    best, best_bytes, best_number = frozenset(chosen), peak_bytes, number + 1
        for numbers in sites[best_number : best_number + prefixes]:
            more = best | set(numbers)
            peak_bytes = self.simulate(more).peak_bytes
            if peak_bytes < best_bytes:
                best, best_bytes = more, peak_bytes
        return self._improved([best, frozenset(ranked), frozenset()], ranked)

    def _improved(self, begins: Sequence[AbstractSet[int]], ranked: Sequence[int]) -> AbstractSet[int]:
        """From each of ``begins`` by one or two more, fewer, or instead of others, as long as that lowers the peak."""
        left = SEARCHED_MOMENTS // max(1, len(self.passed))
        ends: list[tuple[int, AbstractSet[int]]] = []
        for begin in begins:
            chosen, peak_bytes = begin, self.simulate(begin).peak_bytes
            neighbours = _neighbours(chosen, ranked)
            while left > 0 and (changed := next(neighbours, None)) is not None:
                left -= 1
                other_bytes = self.simulate(changed).peak_bytes
                if other_bytes < peak_bytes:
                    chosen, peak_bytes = changed, other_bytes
                    neighbours = _neighbours(chosen, ranked)
            ends.append((peak_bytes, chosen))
        return min(ends, key=itemgetter(0))[1]

    def simulate(  # noqa: C901 - split up it would take longer, and most of the time of a plan goes by here
        self, chosen: AbstractSet[int], limit_bytes: int | None = None, *, in_time_only: bool = True
    ) -> Outcome:
        """The round with ``chosen`` copied.

        Args:
            chosen: what is copied, in the order of the saves.
            limit_bytes: memory at which the oldest leave before their copies are over: compute waits.
            in_time_only: what would make a read wait, or be needed before it is over, is not copied.
        """
        before_ms, spare_ms, last = self._before_ms, self.spare_ms, len(self.times_ms) - 1
        sizes_bytes, memory_bytes, d2h_ms = self.sizes_bytes, self.memory_bytes, self._d2h_ms
        back = self._copies_back(chosen)
        coming = iter(reversed(back.items()))  # the first needed first: so are their positions in order
        next_back, back_at = next(coming, (-1, last + 1))
        leaving: deque[tuple[int, float]] = deque()  # and when its copy is over
        left: dict[int, int] = {}
        away_bytes = peak_bytes = copied_bytes = 0
        d2h_end_ms = waited_ms = 0.0
        moments = zip(self.times_ms, memory_bytes, self.reads_ms, self._saves, strict=True)
        for position, (now_ms, with_all_bytes, read_ms, saves) in enumerate(moments):
            if read_ms is not None:
                waited_ms = max(waited_ms, d2h_end_ms - read_ms)
            if with_all_bytes - away_bytes > peak_bytes:  # noqa: PLR1730 - max() takes longer than all the rest
                peak_bytes = with_all_bytes - away_bytes
            while back_at <= position:
                if next_back in left:
                    away_bytes -= sizes_bytes[next_back]
                next_back, back_at = next(coming, (-1, last + 1))
            if saves in back:
                begin_ms = now_ms + waited_ms
                end_ms = (begin_ms if begin_ms > d2h_end_ms else d2h_end_ms) + d2h_ms[saves]  # noqa: FURB136 - the same
                free_ms = end_ms - waited_ms + spare_ms
                # Whether the copy is over before it would have to begin again, and delays no read.
                can_leave = before_ms[back[saves]] >= free_ms if limit_bytes is None else position + 1 < back[saves]
                if not in_time_only or (can_leave and free_ms <= self._next_read_ms[saves]):
                    d2h_end_ms = end_ms
                    leaving.append((saves, end_ms))
                    copied_bytes += sizes_bytes[saves]
            while leaving:
                number, end_ms = leaving[0]
                if end_ms + spare_ms > now_ms + waited_ms and (
                    limit_bytes is None or position == last or memory_bytes[position + 1] - away_bytes <= limit_bytes
                ):
                    break
                leaving.popleft()
                if back[number] > position:  # else it stays where it is
                    if end_ms - now_ms > waited_ms:  # noqa: PLR1730 - the same
                        waited_ms = end_ms - now_ms
                    left[number] = position
                    away_bytes += sizes_bytes[number]
        return Outcome(self.places, left, back, waited_ms, peak_bytes, copied_bytes)

    def least_peak(self, chosen: AbstractSet[int], free_bytes: int, allowed_ms: float) -> int:
        """The lowest limit that costs no more than ``allowed_ms``, at most ``free_bytes``, which costs nothing."""
        if not allowed_ms:
            return free_bytes
        low = max(0, free_bytes - sum(self.sizes_bytes[number] for number in chosen))
        high = free_bytes
        for _ in range(min(MOST_HALVINGS, max(FEWEST_HALVINGS, 2 * SEARCHED_MOMENTS // max(1, len(self.passed))))):
            middle = (low + high) // 2
            tried = self.simulate(chosen, middle)
            if tried.stalled_ms <= allowed_ms and tried.peak_bytes <= middle:
                high = middle
            else:
                low = middle
        return high

    def useful(self, outcome: Outcome, limit_bytes: int) -> AbstractSet[int]:
        """Those without whose absence memory would exceed ``limit_bytes``."""
        # A position's memory is what lies there when the next moment comes.
        high = [p for p, memory_bytes in enumerate(self.memory_bytes[1:]) if memory_bytes > limit_bytes]
        return {
            number
            for number, begin in outcome.left.items()
            if bisect_left(high, begin) < bisect_left(high, outcome.back[number])
        }

    def fewest(
        self, useful: Sequence[int], limit_bytes: int, *, allowed_ms: float, in_time_only: bool, presses: bool
    ) -> Outcome:
        """Of ``useful`` the first, as many as keep the peak at ``limit_bytes`` and compute waiting ``allowed_ms``."""

        def first(count: int) -> Outcome:
            return self.simulate(set(useful[:count]), limit_bytes if presses else None, in_time_only=in_time_only)

        low, high = 0, len(useful)
        while low < high:
            middle = (low + high) // 2
            tried = first(middle)
            if tried.peak_bytes <= limit_bytes and tried.stalled_ms <= allowed_ms:
                high = middle
            else:
                low = middle + 1
        return first(low)

    def _copies_back(self, chosen: AbstractSet[int]) -> dict[int, int]:
        """The last position from which each copy back, followed by all those needed after it, is in time."""
        back = {}
        begin_ms = float("inf")
        by_ms, h2d_ms, times_ms, position = self._by_ms, self._h2d_ms, self.times_ms, len(self.times_ms) - 1
        for number in self._last_needed_first:
            if number in chosen:
                begin_ms = min(begin_ms, by_ms[number]) - h2d_ms[number]
                position = max(0, bisect_right(times_ms, begin_ms, 0, position + 1) - 1)
                back[number] = position
        return back


def _neighbours(chosen: AbstractSet[int], ranked: Sequence[int]) -> Iterator[AbstractSet[int]]:
    inside = [number for number in reversed(ranked) if number in chosen]
    outside = [number for number in ranked if number not in chosen]
    yield from (chosen | {number} for number in outside)
    yield from (chosen - {number} for number in inside)
    yield from (chosen - {one} | {other} for one in inside for other in outside)
    yield from (chosen | {*two} for two in combinations(outside, 2))
    yield from (chosen - {*two} for two in combinations(inside, 2))
    yield from (chosen - {one} | {*two} for one in inside for two in combinations(outside, 2))
    yield from (chosen - {*two} | {one} for one in outside for two in combinations(inside, 2))
    yield from (chosen - {*two} | {*others} for two in combinations(inside, 2) for others in combinations(outside, 2))
