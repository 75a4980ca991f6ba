"""What is to happen to each site, and when: the words in which planner, schedule and recorder speak to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol


class Site(NamedTuple):
    """A place where a storage is saved, the same in every micro-batch: unit, nth call, nth save in that call."""

    unit: str
    call: int
    save: int


class Place(NamedTuple):
    """Where in a round something is saved: the micro-batch's number in the round, and the site."""

    ordinal: int
    site: Site


class Kind(Enum):
    """What can happen in a round that the schedule sees."""

    LANDMARK = "a module that is no unit is called"
    OPENED = "a unit is called"
    CLOSED = "the call has ended"
    SAVED = "something is saved"
    BACKWARD = "a micro-batch begins backward"
    NEEDED = "backward needs something for the first time"


class Moment(NamedTuple):
    """Something that happens once in a round. Of a call, the place has no save (-1); of a backward, no unit either."""

    kind: Kind
    place: Place


class Verb(Enum):
    OFFLOAD = "offload"
    RELEASE = "release"
    RELOAD = "reload"


class Act(NamedTuple):
    verb: Verb
    key: int


class Action(Enum):
    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    """Neither kept nor copied, but made again in backward. It is for whole units (:attr:`Plan.units`); for a single
    site of a unit that is not recomputed it means the same as ``KEEP``."""


@dataclass(frozen=True)
class Plan:
    """Advice to the schedule. Any plan gives the same gradients; it decides memory and time."""

    sites: Mapping[Site, Action] = field(default_factory=dict)
    """Sites that are treated otherwise than ``default``."""
    default: Action = Action.OFFLOAD
    units: Mapping[str, Action] = field(default_factory=dict)
    """Units that are treated as a whole: those that are recomputed."""
    release_window_bytes: int | None = None
    """Copied bytes that may still lie on the device in forward; None: from what the step saves (see the schedule)."""
    prefetch_window_bytes: int | None = None
    """Bytes that reloads ahead of need may bring the device to in backward; None: from what the step saves."""

    def action(self, site: Site) -> Action:
        return self.sites.get(site, self.default)

    def recomputes(self, unit: str) -> bool:
        """Whether the calls of ``unit`` are made again in backward."""
        return self.units.get(unit) is Action.RECOMPUTE


@dataclass(frozen=True)
class Timetable:
    """How long a round's stretches take: for rounds that are not like the one that was planned for.

    Where something that was foreseen does not come, or saves less, copies and compute are not where the plan has them.
    With this the schedule tells when each copy is over from what has come.
    """

    stretches_ms: Sequence[float]
    """By position, the time since the moment before it."""
    saved_bytes: Mapping[Place, int]
    """What is saved at each place if it is as foreseen."""
    d2h_bytes_per_ms: float
    h2d_bytes_per_ms: float
    spare_ms: float
    """Between the end of a copy, as it is foreseen, and what relies on it."""
    with_bytes: float = 0.0
    """By which part of what a place saves more or less than foreseen its stretch is longer or shorter; 1: by all."""
    allowed_ms: float = 0.0
    """Time for which compute may wait in a round."""


@dataclass(frozen=True)
class Points:
    """When each place leaves the device and when it comes back, in a round that goes as a recorded one did."""

    positions: Mapping[Moment, int]
    """The moments of the recorded round, in their order on the device."""
    release: Mapping[Place, int]
    """Position from which the copy to the host is known to be over."""
    reload: Mapping[Place, int]
    """Last position at which the copy back can begin and be over in time."""
    moved: AbstractSet[Place] | None = None
    """Places that are worth a copy; any other is kept. None: all are copied."""
    within_window: bool = False
    """Whether the release window holds as well: memory before time, even if compute has to wait."""
    timed_bytes: int = 0
    """So many bytes are copied although they are not moved, to learn the link's rate: they stay on the device, too."""
    times: Timetable | None = None
    """For rounds that differ from one another; None: they hardly do."""


TIMED_BYTES = 64 << 20
"""Copied in a round that is to tell the link's rate; a link of 50 GB/s carries it in 1.3 ms."""
NOTHING_MOVES = Points({}, {}, {}, frozenset())
"""For rounds of which nothing is known that would pay, or be in time."""
NOTHING_KNOWN = Points({}, {}, {}, frozenset(), timed_bytes=TIMED_BYTES)
"""For the first rounds: nothing leaves, since nothing is surely in time, but the link is timed."""


class Observer(Protocol):
    """Is told what the schedule passes."""

    def round_began(self, points: Points | None) -> None:
        """A new round, which goes by ``points``; the moments of the last are complete."""

    def micro_batch_began(self, size: int) -> None:
        """A micro-batch of the round; ``size``: of what the root is called with, in tokens or elements."""

    def passed(self, moment: Moment, size_bytes: int, away_bytes: int) -> None:
        """A moment of the round. ``size_bytes``: of what is saved there; ``away_bytes``: on the host alone, now."""

    def held(self, place: Place) -> None:
        """Something else kept on the device what was saved at ``place``: its copy freed nothing."""

    def died(self, place: Place, when: Any) -> None:
        """What was saved at ``place`` in this round is gone since ``when``, which the schedule does not look at."""
