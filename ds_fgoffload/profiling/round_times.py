"""The points on the device's streams that were marked in one round, and the recording of a step made from them.

:class:`RoundTimes` holds the marks, copies and waits of a round; :func:`step_recording` turns them into what can be
drawn. There a parcel, which travels in one copy, is one storage, and backward of a call lasts from when it first needs
something that the call saved until the last of that was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ds_fgoffload.device.streams import Fence
from ds_fgoffload.profiling.recording import Call, Span, Stall, StepRecording, StorageTimes
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Points
from ds_fgoffload.stats import UnitStats

MsOf = Callable[[Fence], float]
"""When the device passed a fence, in ms since the origin of a round."""


class Direction(Enum):
    OUT = "d2h"
    IN = "h2d"


class Mark(NamedTuple):
    moment: Moment
    size_bytes: int
    away_bytes: int
    fence: Fence
    memory_bytes: int
    reads: Sequence[Fence] = ()
    """When reads of the device were over, since the mark before."""


class Copy(NamedTuple):
    size_bytes: int
    ready: Fence
    end: Fence
    stats: UnitStats
    marks: int
    """How many moments had passed when it was queued."""
    block: object
    """The host block's lease, which both copies have in common; None in rounds that nobody wants to see."""


class Wait(NamedTuple):
    marks: int
    begin: Fence
    copy_end: Fence
    stats: UnitStats
    at_death: bool
    """What was copied was dropped while it was on the device, and was not released by this."""


@dataclass
class RoundTimes:
    """One round."""

    points: Points | None = None
    takes_times: bool = True
    after_reads: set[Moment] = field(default_factory=set)
    """Moments before which the host read the device: those of the last round in which that was looked out for."""
    sizes: list[int] = field(default_factory=list)
    """Elements of the tensors that the root was called with, by micro-batch."""
    marks: list[Mark] = field(default_factory=list)
    copies: dict[Direction, list[Copy]] = field(default_factory=lambda: {direction: [] for direction in Direction})
    waits: list[Wait] = field(default_factory=list)
    held: set[Place] = field(default_factory=set)
    peak_bytes: int = 0
    """Memory at its highest; 0: not known."""
    viewers: list[Callable[[StepRecording], None]] = field(default_factory=list)
    """Want to see all of the round. For them the following is kept, too."""
    begin: Fence | None = None
    end: Fence | None = None
    deaths: dict[Place, Fence] = field(default_factory=dict)
    """When the last view of what was saved there was dropped."""

    def is_empty(self) -> bool:
        return not self.marks and not any(self.copies.values())

    def origin(self) -> Fence:
        """From which times are counted."""
        if self.begin is not None:
            return self.begin
        return self.marks[0].fence if self.marks else self.last_fences()[0]

    def last_fences(self) -> list[Fence]:
        """When the device has reached them, it has passed all of the round."""
        marks = [mark.fence for mark in self.marks[-1:]]
        copies = [copies[-1].end for copies in self.copies.values() if copies]
        waits = [wait.begin for wait in self.waits[-1:]]
        return [*marks, *copies, *waits, *(() if self.end is None else (self.end,))]


def copy_spans(copies: Sequence[Copy], ms_of: MsOf) -> list[Span]:
    """When each copy ran; all are of one direction, which works in order."""
    spans: list[Span] = []
    end_ms = float("-inf")
    for copy in copies:
        begin_ms = max(end_ms, ms_of(copy.ready))
        end_ms = max(begin_ms, ms_of(copy.end))
        spans.append((begin_ms, end_ms))
    return spans


def wait_spans(waits: Sequence[Wait], ms_of: MsOf) -> list[Span]:
    """From when until when compute stood still in each wait; begin and end are the same if it did not."""
    spans: list[Span] = []
    now_ms = float("-inf")
    for wait in waits:
        begin_ms = max(now_ms, ms_of(wait.begin))
        now_ms = max(begin_ms, ms_of(wait.copy_end))
        spans.append((begin_ms, now_ms))
    return spans


EARLIER = "(an earlier step)"
"""Stands for the unit of what was copied out in a round before."""


def step_recording(times: RoundTimes, ms_of: MsOf) -> StepRecording:
    """Of a round that the device has passed; ``ms_of`` counts from its begin. It has no title yet."""
    return _Step(times, ms_of).recording()


class _Step:
    def __init__(self, times: RoundTimes, ms_of: MsOf) -> None:
        self._times = times
        self._step_ms = max(map(ms_of, times.last_fences()))
        self._at_ms = {mark.moment: ms_of(mark.fence) for mark in times.marks}
        self._index = {mark.moment: index for index, mark in enumerate(times.marks)}
        self._needed = {mark.moment.place: mark for mark in times.marks if mark.moment.kind is Kind.NEEDED}
        self._freed_ms = {place: ms_of(fence) for place, fence in times.deaths.items()}
        outs, ins = (times.copies[direction] for direction in Direction)
        place_of_block = {id(copy.block): place for copy in outs if (place := self._saved_by(copy)) is not None}
        self._copies = {
            direction: {
                place_of_block.get(id(copy.block)): (copy, span) for copy, span in zip(copies, spans, strict=True)
            }
            for direction, copies, spans in (
                (Direction.OUT, outs, copy_spans(outs, ms_of)),
                (Direction.IN, ins, copy_spans(ins, ms_of)),
            )
        }
        self._place_of_end = {copy.end: place_of_block.get(id(copy.block)) for copy in [*outs, *ins]}
        self._out_ends = {copy.end for copy in outs}
        self._waits = list(zip(times.waits, wait_spans(times.waits, ms_of), strict=True))
        self._released_ms = {
            place: end_ms
            for wait, (_, end_ms) in self._waits
            if wait.copy_end in self._out_ends and not wait.at_death
            and (place := self._place_of_end[wait.copy_end]) not in times.held
        }  # fmt: skip

    def recording(self) -> StepRecording:
        storages, left_out_bytes = [], 0
        for mark in self._times.marks:
            if mark.moment.kind is not Kind.SAVED:
                continue
            if mark.moment.place in self._copies[Direction.OUT] or mark.moment.place in self._needed:
                storages.append(self._storage(mark))
            else:
                left_out_bytes += mark.size_bytes
        memory = ((self._at_ms[mark.moment], float(mark.memory_bytes)) for mark in self._times.marks)
        return StepRecording(
            title="",
            step_ms=self._step_ms,
            storages=tuple(storages),
            calls=tuple(sorted([*self._forwards(), *self._backwards()], key=lambda call: call.start_ms)),
            stalls=tuple(self._stalls()),
            memory=tuple((ms, size_bytes) for ms, size_bytes in memory if size_bytes),
            facts={"not drawn": f"{left_out_bytes} bytes that stayed on the device"} if left_out_bytes else {},
        )

    def _saved_by(self, copy: Copy) -> Place | None:
        """A copy out is queued at the moment of the save."""
        mark = self._times.marks[copy.marks - 1] if copy.marks else None
        is_its_own = mark is not None and mark.moment.kind is Kind.SAVED and mark.size_bytes == copy.size_bytes
        return mark.moment.place if mark is not None and is_its_own else None

    def _storage(self, mark: Mark) -> StorageTimes:
        place = mark.moment.place
        _, out_span = self._copies[Direction.OUT].get(place, (None, None))
        back, back_span = self._copies[Direction.IN].get(place, (None, None))
        needed = self._needed.get(place)
        return StorageTimes(
            place.site.unit,
            mark.size_bytes,
            saved_ms=self._at_ms[mark.moment],
            freed_ms=self._freed_ms.get(place, self._step_ms),
            d2h=out_span,
            released_ms=self._released_ms.get(place),
            h2d=back_span,
            late=back is not None and needed is not None and back.marks > self._index[needed.moment],
        )

    def _forwards(self) -> Iterator[Call]:
        opened_ms: dict[Place, float] = {}
        for moment, at_ms in self._at_ms.items():
            if moment.kind is Kind.OPENED:
                opened_ms[moment.place] = at_ms
            elif moment.kind is Kind.CLOSED and moment.place in opened_ms:
                yield Call(moment.place.site.unit, opened_ms[moment.place], at_ms)

    def _backwards(self) -> Iterator[Call]:
        spans: dict[tuple[int, str, int], Span] = {}
        for place, mark in self._needed.items():
            begin_ms = self._at_ms[mark.moment]
            call = (place.ordinal, place.site.unit, place.site.call)
            first_ms, last_ms = spans.get(call, (begin_ms, begin_ms))
            spans[call] = min(first_ms, begin_ms), max(last_ms, self._freed_ms.get(place, begin_ms))
        for (_, unit, _), (begin_ms, end_ms) in spans.items():
            yield Call(unit, begin_ms, end_ms, backward=True)

    def _stalls(self) -> Iterator[Stall]:
        for wait, (begin_ms, end_ms) in self._waits:
            if end_ms > begin_ms:
                place = self._place_of_end.get(wait.copy_end)
                is_out = wait.copy_end in self._out_ends
                unit = EARLIER if place is None else place.site.unit
                yield Stall(unit, begin_ms, end_ms, "release" if is_out else "reload")
