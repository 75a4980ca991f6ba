"""The points on the device's streams that were marked in one round, and what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ds_fgoffload.plan import Moment, Place, Points
from ds_fgoffload.recording import Span, StepRecording
from ds_fgoffload.stats import UnitStats
from ds_fgoffload.streams import Fence

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
