"""Takes the device's time at every moment of a round, of every copy and of every wait for one, and never waits for it.

Events are queued on the streams as the round goes, and read when the device has passed the last of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ds_fgoffload.device.streams import Fence, Streams
from ds_fgoffload.host_memory.lease import Lease
from ds_fgoffload.profiling.blocking_reads import BlockingReads
from ds_fgoffload.profiling.profile import ProfiledMoment, RoundProfile
from ds_fgoffload.profiling.recording import StepRecording
from ds_fgoffload.profiling.round_times import (
    Copy,
    Direction,
    Mark,
    MsOf,
    RoundTimes,
    Wait,
    copy_spans,
    step_recording,
    wait_spans,
)
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Points
from ds_fgoffload.stats import RoundStats, UnitStats

SMALLEST_TIMED_BYTES = 1 << 20
"""Smaller copies say more of the start of a copy than of the link's rate."""


@dataclass(frozen=True)
class Recorded:
    """A round that is over."""

    profile: RoundProfile
    points: Points | None
    """What it went by."""
    with_memory: bool
    peak_between_bytes: int
    """Memory at its highest between two moments, less the highest at one; 0 if that is not known."""
    highest_bytes: int = 0
    """Device memory at its highest at a moment; 0 if that is not known."""


class Recorder:
    """The schedule's observer, and the transfer's."""

    def __init__(self, streams: Streams, compute: Callable[[], Any]) -> None:
        self._streams = streams
        self._compute = compute
        self._round = RoundTimes()
        self._over: deque[RoundTimes] = deque()
        self._viewers: list[Callable[[StepRecording], None]] = []
        self._rates: dict[Direction, float] = {}
        self.rounds = RoundStats()
        """What users are told of the rounds."""
        self._reads = BlockingReads(self.rounds.reads)
        self._after_reads: set[Moment] = set()
        self._reads_over: list[Fence] = []
        # The last marked round's: the next has the same objects, since what waits to be read is work for the collector.
        self._moments: dict[Moment, Moment] = {}
        self._measures = self._measures_next = False
        self._peak_bytes = 0
        self._watching_thread: int | None = None
        self.memory_bytes = 0
        """Of the device, allocated when it was last looked at."""
        self.takes_times = True
        """Whether the moments of the rounds that begin now are marked on the device; copies and waits always are."""

    def measure(self, *, measure: bool) -> None:
        """Whether memory is asked for at each moment and reads are looked out for, which takes the host some time.

        From the next round on: half a round's memory says nothing.
        """
        self._measures_next = measure

    def _watch_reads(self, *, watch: bool) -> None:
        if watch != (self._watching_thread is not None):
            self._watching_thread = threading.get_ident() if watch else None
            self._streams.watch_reads(self._read_is_over if watch else None)
        self._reads_over = []

    def _read_is_over(self) -> None:
        fence = self._streams.fence(self._compute()) if threading.get_ident() == self._watching_thread else None
        if fence is not None:
            self._reads_over.append(fence)

    def show(self, viewer: Callable[[StepRecording], None]) -> None:
        """``viewer`` is called with the whole of the round that begins next, once the device has passed it."""
        self._viewers.append(viewer)

    def end(self) -> None:
        """No more rounds will begin: what is not yet shown to its viewers is now, for which the host waits."""
        self._measures = self._measures_next = False
        self._watch_reads(watch=False)
        if self._round.viewers:
            self.round_began(None)
        if any(over.viewers for over in self._over):
            for fence in (fence for over in self._over for fence in over.last_fences()):
                self._streams.synchronize(fence)
            while self.read() is not None:
                pass

    def round_began(self, points: Points | None) -> None:
        viewers, self._viewers = self._viewers, []
        begin = self._streams.fence(self._compute()) if viewers or self._round.viewers else None
        if self._round.is_empty():
            viewers += self._round.viewers
        else:
            if self._round.viewers:
                self._round.end = begin
            self._round.peak_bytes = self._peak_of_the_round()
            self._moments = {mark.moment: mark.moment for mark in self._round.marks} or self._moments
            self._over.append(self._round)
        self._measures = self._measures_next
        self._watch_reads(watch=False)
        if self._measures:
            self._after_reads = set()  # what was read in one round need not be in the next
        takes_times = self.takes_times or bool(viewers)
        self._round = RoundTimes(points, takes_times, after_reads=self._after_reads, viewers=viewers)
        if viewers:
            self._round.begin = begin

    def _peak_of_the_round(self) -> int:
        """0: not known, as memory has been higher before."""
        before_bytes = self._peak_bytes
        if self._asks_for_memory():
            self._peak_bytes = self._streams.peak_allocated_bytes()
        return 0 if self._peak_bytes == before_bytes else self._peak_bytes

    def micro_batch_began(self, size: int) -> None:
        self._round.sizes.append(size)

    def passed(self, moment: Moment, size_bytes: int, away_bytes: int) -> None:
        if not self._round.takes_times:
            return
        fence = self._streams.fence(self._compute())
        assert fence is not None
        memory_bytes = 0
        if self._asks_for_memory():
            self.memory_bytes = memory_bytes = self._streams.allocated_bytes()
        reads = self._reads_over
        if self._measures:
            if reads:
                self._round.after_reads.add(moment)
            # In backward, threads of autograd's read; nobody would keep their warnings from being shown.
            self._watch_reads(watch=moment.kind not in (Kind.BACKWARD, Kind.NEEDED))
        moment = self._moments.get(moment, moment)
        self._round.marks.append(Mark(moment, size_bytes, away_bytes, fence, memory_bytes, reads))

    def held(self, place: Place) -> None:
        self._round.held.add(place)

    def died(self, place: Place, when: Fence | None) -> None:
        if when is not None:
            self._round.deaths[place] = when

    def death(self, compute: Any) -> Fence | None:
        """When something dies that was used on ``compute``: now. None if nobody wants to know."""
        return self._streams.fence(compute) if self._round.viewers else None

    def copied(self, direction: Direction, lease: Lease, ready: Fence, end: Fence, stats: UnitStats) -> None:
        """A copy from or to the block was queued behind ``ready``; ``end`` marks its end."""
        block = lease if self._round.viewers else None
        copy = Copy(lease.size_bytes, ready, end, stats, len(self._round.marks), block)
        self._round.copies[direction].append(copy)

    def waits(self, copy_end: Fence, stats: UnitStats, begin: Fence | None = None) -> None:
        """Compute waits for a copy from ``begin`` on; from the last moment on, if that was just now."""
        marks = self._round.marks
        at_death = begin is not None
        if begin is None:
            begin = marks[-1].fence if marks else self._streams.fence(self._compute())
        if begin is not None:
            self._round.waits.append(Wait(len(marks), begin, copy_end, stats, at_death))

    def read(self) -> Recorded | None:
        """The next round with times that the device has passed; what rounds tell of copies and waits is counted."""
        while self._over and all(map(self._streams.reached, self._over[0].last_fences())):
            over = self._over.popleft()
            ms_of = partial(self._streams.elapsed_ms, over.origin())
            for direction, copies in over.copies.items():
                self._count_copies(direction, copies, ms_of)
            stalled_ms = self._count_waits(over, ms_of)
            for viewer in over.viewers:
                viewer(step_recording(over, ms_of))
            if over.marks:
                profile = self._profile(over, ms_of, stalled_ms)
                highest_bytes = max(mark.memory_bytes for mark in over.marks)
                between_bytes = max(0, over.peak_bytes - highest_bytes)
                return Recorded(profile, over.points, highest_bytes > 0, between_bytes, highest_bytes)
        return None

    @property
    def unread_rounds(self) -> int:
        """Rounds that are over and have not been read."""
        return len(self._over)

    def total_bytes(self) -> int:
        """Memory of the device."""
        return self._streams.total_bytes()

    def empty_cache(self) -> None:
        """Gives the device what its allocator keeps for reuse; the host waits for the device."""
        self._streams.empty_cache()

    def _asks_for_memory(self) -> bool:
        return self._measures or bool(self._round.viewers)

    def _count_copies(self, direction: Direction, copies: list[Copy], ms_of: MsOf) -> None:
        timed: list[tuple[int, float]] = []
        for copy, (begin_ms, end_ms) in zip(copies, copy_spans(copies, ms_of), strict=True):
            if direction is Direction.OUT:
                copy.stats.copying_out_ms += end_ms - begin_ms
                copy.stats.timed_out_bytes += copy.size_bytes
            else:
                copy.stats.copying_in_ms += end_ms - begin_ms
                copy.stats.timed_in_bytes += copy.size_bytes
            timed.append((copy.size_bytes, end_ms - begin_ms))
        large = [(size_bytes, ms) for size_bytes, ms in timed if size_bytes >= SMALLEST_TIMED_BYTES] or timed
        in_all_ms = sum(ms for _, ms in large)
        if in_all_ms:
            self._rates[direction] = sum(size_bytes for size_bytes, _ in large) / in_all_ms

    def _count_waits(self, over: RoundTimes, ms_of: MsOf) -> list[float]:
        """By mark, how long compute waited just after it."""
        stalled_ms = [0.0] * (len(over.marks) + 1)
        for wait, (begin_ms, end_ms) in zip(over.waits, wait_spans(over.waits, ms_of), strict=True):
            wait.stats.stalled_ms += end_ms - begin_ms
            stalled_ms[wait.marks] += end_ms - begin_ms
        return stalled_ms

    def _profile(self, over: RoundTimes, ms_of: MsOf, stalled_ms: list[float]) -> RoundProfile:
        """The moments without the waits."""
        at_ms = [ms_of(mark.fence) for mark in over.marks]
        ends_ms = [ms_of(copy.end) for copy in over.copies[Direction.OUT]]
        passed: list[ProfiledMoment] = []
        taken_out_ms = reads_waited_ms = 0.0
        guessed = False
        for position, mark in enumerate(over.marks):
            taken_out_ms += stalled_ms[position]
            read = None
            if position and mark.moment in over.after_reads:
                begin_ms = at_ms[position - 1] + stalled_ms[position]
                read = self._reads.seen(
                    mark.moment, begin_ms, at_ms[position], ends_ms, [ms_of(fence) for fence in mark.reads]
                )
                took_ms = at_ms[position] - begin_ms
                self._reads.count(mark.moment, read, took_ms, *_units_around(over.marks, position))
                taken_out_ms += read.waited_ms
                reads_waited_ms += read.waited_ms
                guessed = guessed or read.guessed
            memory_bytes = mark.memory_bytes + mark.away_bytes if mark.memory_bytes else 0
            own_ms = at_ms[position] - taken_out_ms
            read_at_ms = None if read is None else own_ms - read.after_ms
            passed.append(ProfiledMoment(mark.moment, own_ms, mark.size_bytes, memory_bytes, read_at_ms))
        d2h, h2d = (self._rates.get(direction, max(self._rates.values(), default=0.0)) for direction in Direction)
        waited_ms = sum(stalled_ms) + reads_waited_ms
        return RoundProfile(passed, d2h, h2d, frozenset(over.held), waited_ms, guessed, tuple(over.sizes))


def _units_around(marks: list[Mark], position: int) -> tuple[str | None, str | None]:
    """The units of the last moment before the position, and of the next from it on, at which a unit was at work."""
    before, after = reversed(marks[:position]), marks[position:]
    return next(_units_in_forward(before), None), next(_units_in_forward(after), None)


def _units_in_forward(marks: Iterable[Mark]) -> Iterator[str]:
    return (mark.moment.place.site.unit for mark in marks if mark.moment.kind in _OF_UNITS)


_OF_UNITS = (Kind.OPENED, Kind.SAVED, Kind.CLOSED)
