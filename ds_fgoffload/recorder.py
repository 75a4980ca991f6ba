"""Takes the device's time at every moment of a round, of every copy and of every wait for one, and never waits for it.

Events are queued on the streams as the round goes, and read when the device has passed the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ds_fgoffload.plan import Kind, Moment, Place, Points
from ds_fgoffload.reads import Reads
from ds_fgoffload.simulation import Passed, Recording
from ds_fgoffload.stats import UnitStats
from ds_fgoffload.streams import Fence, Streams

SMALLEST_TIMED_BYTES = 1 << 20
"""Smaller copies say more of the start of a copy than of the link's rate."""


class Direction(Enum):
    OUT = "d2h"
    IN = "h2d"


class _Mark(NamedTuple):
    moment: Moment
    size_bytes: int
    away_bytes: int
    fence: Fence
    memory_bytes: int


class _Copy(NamedTuple):
    size_bytes: int
    ready: Fence
    end: Fence
    stats: UnitStats


class _Wait(NamedTuple):
    marks: int
    begin: Fence
    copy_end: Fence
    stats: UnitStats


@dataclass
class _Round:
    points: Points | None = None
    takes_times: bool = True
    marks: list[_Mark] = field(default_factory=list)
    copies: dict[Direction, list[_Copy]] = field(default_factory=lambda: {direction: [] for direction in Direction})
    waits: list[_Wait] = field(default_factory=list)
    held: set[Place] = field(default_factory=set)
    peak_bytes: int = 0

    def has_copies(self) -> bool:
        return any(self.copies.values())


@dataclass(frozen=True)
class Recorded:
    """A round that is over."""

    recording: Recording
    points: Points | None
    """What it went by."""
    with_memory: bool
    peak_between_bytes: int
    """Memory at its highest between two moments, less the highest at one."""


class Recorder:
    """The schedule's witness, and the transfer's."""

    def __init__(self, streams: Streams, compute: Callable[[], Any]) -> None:
        self._streams = streams
        self._compute = compute
        self._round = _Round()
        self._over: deque[_Round] = deque()
        self._rates: dict[Direction, float] = {}
        self._reads = Reads()
        self._after_reads: set[Moment] = set()
        self._reads_before = 0
        self._measures = False
        self._watches = False
        self.takes_times = True
        """Whether the moments of the rounds that begin now are marked on the device; copies and waits always are."""

    def measure(self, *, measure: bool) -> None:
        """Whether memory is asked for at each moment and reads are looked out for, which takes the host some time."""
        self._measures = measure
        self._watch_reads(watch=False)

    def _watch_reads(self, *, watch: bool) -> None:
        if watch != self._watches:
            self._watches = watch
            self._streams.watch_reads(watch=watch)
        self._reads_before = self._streams.reads()

    def round_began(self, points: Points | None) -> None:
        if self._round.marks or self._round.has_copies():
            self._round.peak_bytes = self._streams.peak_allocated_bytes() if self._measures else 0
            self._over.append(self._round)
        self._round = _Round(points, self.takes_times)

    def passed(self, moment: Moment, size_bytes: int, away_bytes: int) -> None:
        if not self._round.takes_times:
            return
        fence = self._streams.fence(self._compute())
        assert fence is not None
        memory_bytes = 0
        if self._measures:
            memory_bytes = self._streams.allocated_bytes()
            if self._watches and self._streams.reads() != self._reads_before:
                self._after_reads.add(moment)
            # In backward, threads of autograd's read; nobody would keep their warnings from being shown.
            self._watch_reads(watch=moment.kind not in (Kind.BACKWARD, Kind.NEEDED))
        self._round.marks.append(_Mark(moment, size_bytes, away_bytes, fence, memory_bytes))

    def held(self, place: Place) -> None:
        self._round.held.add(place)

    def copied(self, direction: Direction, size_bytes: int, ready: Fence, end: Fence, stats: UnitStats) -> None:
        """A copy was queued behind ``ready``; ``end`` marks its end."""
        self._round.copies[direction].append(_Copy(size_bytes, ready, end, stats))

    def waits(self, copy_end: Fence, stats: UnitStats, begin: Fence | None = None) -> None:
        """Compute waits for a copy from ``begin`` on; from the last moment on, if that was just now."""
        marks = self._round.marks
        if begin is None:
            begin = marks[-1].fence if marks else self._streams.fence(self._compute())
        if begin is not None:
            self._round.waits.append(_Wait(len(marks), begin, copy_end, stats))

    def read(self) -> Recorded | None:
        """The next round with times that the device has passed; what rounds tell of copies and waits is counted."""
        while self._over and all(map(self._streams.reached, _last_fences(self._over[0]))):
            over = self._over.popleft()
            origin = over.marks[0].fence if over.marks else _last_fences(over)[0]
            for direction, copies in over.copies.items():
                self._count_copies(direction, copies, origin)
            stalled_ms = self._count_waits(over, origin)
            if over.marks:
                recording = self._recording(over, origin, stalled_ms)
                highest_bytes = max(mark.memory_bytes for mark in over.marks)
                return Recorded(recording, over.points, highest_bytes > 0, max(0, over.peak_bytes - highest_bytes))
        return None

    def total_bytes(self) -> int:
        """Memory of the device."""
        return self._streams.total_bytes()

    def empty_cache(self) -> None:
        """Gives the device what its allocator keeps for reuse; the host waits for the device."""
        self._streams.empty_cache()

    def _count_copies(self, direction: Direction, copies: list[_Copy], origin: Fence) -> None:
        timed: list[tuple[int, float]] = []
        last_end_ms = float("-inf")
        for copy in copies:
            begin_ms = max(last_end_ms, self._streams.elapsed_ms(origin, copy.ready))
            last_end_ms = self._streams.elapsed_ms(origin, copy.end)
            took_ms = max(0.0, last_end_ms - begin_ms)
            if direction is Direction.OUT:
                copy.stats.copying_out_ms += took_ms
            else:
                copy.stats.copying_in_ms += took_ms
            timed.append((copy.size_bytes, took_ms))
        large = [(size_bytes, ms) for size_bytes, ms in timed if size_bytes >= SMALLEST_TIMED_BYTES] or timed
        in_all_ms = sum(ms for _, ms in large)
        if in_all_ms:
            self._rates[direction] = sum(size_bytes for size_bytes, _ in large) / in_all_ms

    def _count_waits(self, over: _Round, origin: Fence) -> list[float]:
        """By mark, how long compute waited just after it."""
        stalled_ms = [0.0] * (len(over.marks) + 1)
        now_ms = float("-inf")
        for marks, begin, copy_end, stats in over.waits:
            now_ms = max(now_ms, self._streams.elapsed_ms(origin, begin))
            waited_ms = max(0.0, self._streams.elapsed_ms(origin, copy_end) - now_ms)
            now_ms += waited_ms
            stats.stalled_ms += waited_ms
            stalled_ms[marks] += waited_ms
        return stalled_ms

    def _recording(self, over: _Round, origin: Fence, stalled_ms: list[float]) -> Recording:
        """The moments without the waits."""
        at_ms = [self._streams.elapsed_ms(origin, mark.fence) for mark in over.marks]
        ends_ms = [self._streams.elapsed_ms(origin, copy.end) for copy in over.copies[Direction.OUT]]
        passed: list[Passed] = []
        taken_out_ms = reads_waited_ms = 0.0
        guessed = False
        for position, mark in enumerate(over.marks):
            taken_out_ms += stalled_ms[position]
            read = None
            if position and mark.moment in self._after_reads:
                begin_ms = at_ms[position - 1] + stalled_ms[position]
                read = self._reads.seen(mark.moment, begin_ms, at_ms[position], ends_ms)
                taken_out_ms += read.waited_ms
                reads_waited_ms += read.waited_ms
                guessed = guessed or read.guessed
            memory_bytes = mark.memory_bytes + mark.away_bytes
            own_ms = at_ms[position] - taken_out_ms
            read_at_ms = None if read is None else own_ms - read.after_ms
            passed.append(Passed(mark.moment, own_ms, mark.size_bytes, memory_bytes, read_at_ms))
        d2h, h2d = (self._rates.get(direction, max(self._rates.values(), default=0.0)) for direction in Direction)
        waited_ms = sum(stalled_ms) + reads_waited_ms
        return Recording(passed, d2h, h2d, frozenset(over.held), waited_ms, guessed)


def _last_fences(over: _Round) -> list[Fence]:
    marks = [mark.fence for mark in over.marks[-1:]]
    copies = [copies[-1].end for copies in over.copies.values() if copies]
    return [*marks, *copies, *(wait.begin for wait in over.waits[-1:])]
