"""What a round would be like if other places were copied: the link simulated over a recorded round.

Copies go out in the order of the saves and come back in the order of need, each direction at the rate that was
measured. Times are milliseconds on the device, without the waits that offloading itself caused.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from ds_fgoffload.profiling.profile import RoundProfile
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Site

SPARE_TIME_MS = 0.2
"""Between the end of a copy, as it is foreseen, and what relies on it."""
SEARCH_STEPS = 12
"""Halvings of the range in which the least peak is looked for."""
PREFIXES = 32
"""Most numbers of sites that are tried one by one."""


class Absence(NamedTuple):
    """From which position to which a place is not on the device."""

    begin: int
    end: int


@dataclass
class Outcome:
    absences: dict[Place, Absence] = field(default_factory=dict)
    release: dict[Place, int] = field(default_factory=dict)
    reload: Mapping[Place, int] = field(default_factory=dict)
    stalled_ms: float = 0.0
    peak_bytes: int = 0
    copied_bytes: int = 0


class Round:
    """The recorded round, and what would become of it."""

    def __init__(self, profile: RoundProfile, caution: float) -> None:
        self.passed = profile.passed
        self.times_ms = [passed.at_ms for passed in self.passed]
        self.spare_ms = SPARE_TIME_MS * caution
        self.d2h_bytes_per_ms = profile.d2h_bytes_per_ms / caution
        self.h2d_bytes_per_ms = profile.h2d_bytes_per_ms / caution
        self.positions: dict[Moment, int] = {}
        self.saved: dict[Place, int] = {}
        self.needed: dict[Place, int] = {}
        for position, (moment, _, size_bytes, *_) in enumerate(self.passed):
            self.positions[moment] = position
            if moment.kind is Kind.SAVED and size_bytes:
                self.saved.setdefault(moment.place, position)
            elif moment.kind is Kind.NEEDED:
                self.needed.setdefault(moment.place, position)
        self.candidates: AbstractSet[Place] = {place for place in self.needed if place in self.saved}
        self.sizes_bytes = {place: self.passed[position].size_bytes for place, position in self.saved.items()}
        self.saved_at = {self.saved[place]: place for place in self.candidates}
        self._last_needed_first = sorted(self.candidates, key=self.needed.__getitem__, reverse=True)
        self.reads = [position for position, passed in enumerate(self.passed) if passed.read_at_ms is not None]
        self.reads_ms = [passed.read_at_ms for passed in self.passed if passed.read_at_ms is not None]

    def ranked(self, places: AbstractSet[Place]) -> list[Place]:
        """What could be away for longest comes first; a site's places in all micro-batches are next to each other."""
        of_site: dict[Site, list[Place]] = {}
        for place in sorted(places, key=self.saved.__getitem__):
            of_site.setdefault(place.site, []).append(place)

        def time_ms(site: Site) -> float:
            return fmean(self.times_ms[self.needed[p]] - self.times_ms[self.saved[p]] for p in of_site[site])

        return [place for site in sorted(of_site, key=time_ms, reverse=True) for place in of_site[site]]

    def lowest_peak(self, ranked: Sequence[Place]) -> AbstractSet[Place]:
        """What brings the peak down furthest without a wait.

        Not everything: what is copied takes the link from what could be away for longer. So it is the first of
        ``ranked`` up to some site, and of the sites after it those that the link has time for all the same.
        """
        sites = [list(places) for _, places in groupby(ranked, key=attrgetter("site"))]
        chosen: set[Place] = set()
        best: AbstractSet[Place] = frozenset()
        best_bytes, best_number = self.simulate(best).peak_bytes, 0
        step = max(1, len(sites) // PREFIXES)
        for number in range(len(sites)):
            chosen.update(sites[number])
            if (number + 1) % step == 0 or number + 1 == len(sites):
                peak_bytes = self.simulate(chosen).peak_bytes
                if peak_bytes < best_bytes:
                    best, best_bytes, best_number = frozenset(chosen), peak_bytes, number + 1
        for places in sites[best_number : best_number + PREFIXES]:
            more = best | set(places)
            peak_bytes = self.simulate(more).peak_bytes
            if peak_bytes < best_bytes:
                best, best_bytes = more, peak_bytes
        return best

    def simulate(
        self, chosen: AbstractSet[Place], limit_bytes: int | None = None, *, in_time_only: bool = True
    ) -> Outcome:
        """The round with ``chosen`` copied.

        Args:
            chosen: what is copied, in the order of the saves.
            limit_bytes: memory at which the oldest leave before their copies are over: compute waits.
            in_time_only: what would make a read wait, or be needed before it is over, is not copied.
        """
        return _Simulation(self, chosen, limit_bytes, in_time_only=in_time_only).run()

    def least_peak(self, chosen: AbstractSet[Place], free_bytes: int, allowed_ms: float) -> int:
        """The lowest limit that costs no more than ``allowed_ms``, at most ``free_bytes``, which costs nothing."""
        if not allowed_ms:
            return free_bytes
        low = max(0, free_bytes - sum(self.sizes_bytes[place] for place in chosen))
        high = free_bytes
        for _ in range(SEARCH_STEPS):
            middle = (low + high) // 2
            tried = self.simulate(chosen, middle)
            if tried.stalled_ms <= allowed_ms and tried.peak_bytes <= middle:
                high = middle
            else:
                low = middle
        return high

    def useful(self, outcome: Outcome, limit_bytes: int) -> AbstractSet[Place]:
        """Places without whose absence memory would exceed ``limit_bytes``."""
        # A position's memory is what lies there when the next moment comes.
        high = [p for p, passed in enumerate(self.passed[1:]) if passed.memory_bytes > limit_bytes]
        return {
            place
            for place, (begin, end) in outcome.absences.items()
            if bisect_left(high, begin) < bisect_left(high, end)
        }

    def fewest(
        self, useful: Sequence[Place], limit_bytes: int, *, allowed_ms: float, in_time_only: bool, presses: bool
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

    def reload_positions(self, chosen: AbstractSet[Place]) -> dict[Place, int]:
        """The last position from which each place's copy back, followed by all those needed after it, is in time."""
        positions = {}
        begin_ms = float("inf")
        for place in self._last_needed_first:
            if place not in chosen:
                continue
            end_ms = min(begin_ms, self.times_ms[self.needed[place]] - self.spare_ms)
            begin_ms = end_ms - self.sizes_bytes[place] / self.h2d_bytes_per_ms
            positions[place] = max(0, bisect_right(self.times_ms, begin_ms) - 1)
        return positions


class _Simulation:
    """One way through the round, as :meth:`Round.simulate` says."""

    def __init__(self, of: Round, chosen: AbstractSet[Place], limit_bytes: int | None, *, in_time_only: bool) -> None:
        self._round = of
        self._chosen = chosen
        self._limit_bytes = limit_bytes
        self._in_time_only = in_time_only
        self._outcome = Outcome(reload=of.reload_positions(chosen))
        self._coming_back: dict[int, list[Place]] = {}
        for place, position in self._outcome.reload.items():
            self._coming_back.setdefault(position, []).append(place)
        self._leaving: deque[tuple[Place, float]] = deque()  # and when its copy is over
        self._away: set[Place] = set()
        self._away_bytes = 0
        self._d2h_end_ms = 0.0
        self._now_ms = 0.0  # without what compute has waited
        self._waited_ms = 0.0

    def run(self) -> Outcome:
        peak_bytes = 0
        for position, (_, at_ms, _, recorded_bytes, read_at_ms) in enumerate(self._round.passed):
            if read_at_ms is not None:
                self._now_ms = read_at_ms
                self._wait_until(self._d2h_end_ms)
            self._now_ms = at_ms
            memory_bytes = recorded_bytes - self._away_bytes
            if memory_bytes > peak_bytes:  # noqa: PLR1730 - max() takes longer, and this is the innermost loop of a plan
                peak_bytes = memory_bytes
            if position in self._coming_back:
                self._come_back(position)
            place = self._round.saved_at.get(position)
            if place is not None and place in self._chosen:
                self._copy(place, position)
            if self._leaving:
                self._leave(position)
        self._outcome.peak_bytes = peak_bytes
        self._outcome.stalled_ms = self._waited_ms
        return self._outcome

    def _wait_until(self, then_ms: float) -> None:
        self._waited_ms += max(0.0, then_ms - self._waited_ms - self._now_ms)

    def _come_back(self, position: int) -> None:
        for place in self._coming_back[position]:
            if place in self._away:
                self._away.remove(place)
                self._away_bytes -= self._round.sizes_bytes[place]
                self._outcome.absences[place] = Absence(self._outcome.release[place], position)

    def _copy(self, place: Place, position: int) -> None:
        size_bytes = self._round.sizes_bytes[place]
        begin_ms = max(self._d2h_end_ms, self._now_ms + self._waited_ms)
        end_ms = begin_ms + size_bytes / self._round.d2h_bytes_per_ms
        if self._in_time_only and not self._is_over_in_time(place, position, end_ms - self._waited_ms):
            return
        self._d2h_end_ms = end_ms
        self._leaving.append((place, end_ms))
        self._outcome.copied_bytes += size_bytes

    def _is_over_in_time(self, place: Place, position: int, end_ms: float) -> bool:
        """Whether a copy that ends then delays no read, and is over before it would have to begin again."""
        free_ms = end_ms + self._round.spare_ms
        read = bisect_right(self._round.reads, position)
        if read < len(self._round.reads) and free_ms > self._round.reads_ms[read]:
            return False
        free = position + 1 if self._limit_bytes is not None else bisect_left(self._round.times_ms, free_ms)
        return free < self._outcome.reload[place]

    def _leave(self, position: int) -> None:
        while self._leaving:
            place, end_ms = self._leaving[0]
            is_over = end_ms + self._round.spare_ms <= self._now_ms + self._waited_ms
            if not is_over and not self._presses(position):
                return
            self._leaving.popleft()
            if self._outcome.reload[place] <= position:
                continue  # stays where it is
            self._wait_until(end_ms)
            self._outcome.release[place] = position
            self._away.add(place)
            self._away_bytes += self._round.sizes_bytes[place]

    def _presses(self, position: int) -> bool:
        """Whether memory would exceed the limit at the next moment."""
        following = self._round.passed[position + 1 : position + 2]
        return self._limit_bytes is not None and any(
            passed.memory_bytes - self._away_bytes > self._limit_bytes for passed in following
        )
