"""What a plan file's rounds would be planned to do under other settings: another link, device, size or allowed time.

The plans are the tuner's own (:class:`~ds_fgoffload.planning.tuner.Tuner`), made from the same rounds; no device is
asked for anything. Times are milliseconds from a round's first moment, without waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from ds_fgoffload.device.streams import SynchronousStreams
from ds_fgoffload.errors import PlanFileError
from ds_fgoffload.planning.plan_file import Known, PlanFile
from ds_fgoffload.planning.planner import Forecast, PlanGoal
from ds_fgoffload.planning.tuner import NEVER, Tuner
from ds_fgoffload.profiling.profile import ProfiledMoment, RoundProfile
from ds_fgoffload.profiling.recorder import Recorded, Recorder
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Points

OVERHEADS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
"""Of the curve; after them comes what can be freed at all."""
NO_LIMIT = 1e3
"""An overhead that bounds nothing: copies of all that is saved take less than so many rounds."""


class Treatment(Enum):
    """What happens to what is saved at a place."""

    MOVED = "moved"
    KEPT = "kept"
    HELD = "held"
    """Kept, because something else holds its memory until backward: a copy would free nothing."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link to the host, in place of the one that was measured."""

    bytes_per_ms: float | None = None
    """Either way; None: as it was measured."""
    times: float = 1.0
    """So many times as fast as that."""

    def of(self, measured_bytes_per_ms: float) -> float:
        return self.times * (self.bytes_per_ms or measured_bytes_per_ms)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked for."""

    goal: PlanGoal
    link: Link = Link()
    device_bytes: int
    """Memory of the device."""
    size: int | None = None
    """Elements that the root is called with; None: the size of the largest rounds that are known."""

    @classmethod
    def of_file(cls, file: PlanFile) -> Settings:
        """Those of the run that wrote it."""
        goal = PlanGoal(max_overhead=file.max_overhead, target_saved_bytes=file.target_saved_bytes)
        return cls(goal=goal, device_bytes=file.machine.memory_bytes)


@dataclass(frozen=True)
class SavedPlace:
    """Something that a round saves for backward, and what happens to it."""

    place: Place
    size_bytes: int
    treatment: Treatment
    saved_ms: float
    needed_ms: float | None
    """None: backward does not need it."""
    leaves_ms: float | None
    """When its device memory is given back; None: it stays."""
    comes_back_ms: float | None
    """When its copy back begins."""


@dataclass(frozen=True)
class CurvePoint:
    """What the plan would do that may add so much time."""

    max_overhead: float | None
    """That was allowed; None: any."""
    set_to: float | None
    """That gives this plan. It is less than what is allowed where the plan that may add more would free less."""
    peak_bytes: int
    freed_bytes: int
    moved_bytes: int
    added_ms: float
    added: float
    """Of the round."""


@dataclass(frozen=True)
class WhatIf:
    """A plan and what it is expected to do."""

    settings: Settings
    size: int
    """0: of several micro-batches in flight, which are taken as they came."""
    known_sizes: tuple[int, int] | None
    """The smallest and the largest of the known rounds."""
    points: Points
    places: Sequence[SavedPlace]
    """In the order of the saves."""
    units: Sequence[str]
    """All units, those that save nothing, too."""
    recomputed: frozenset[str]
    length_ms: float
    """Of the round without waits."""
    added_ms: float
    peak_without_bytes: int
    peak_bytes: int
    room_bytes: int
    """That the peak is to stay below."""
    d2h_bytes_per_ms: float
    h2d_bytes_per_ms: float
    curve: Sequence[CurvePoint]
    verdict: str | None
    """Why offloading does not pay, so that nothing is moved; None: it does."""

    @property
    def freed_bytes(self) -> int:
        return self.peak_without_bytes - self.peak_bytes

    @property
    def saved_bytes(self) -> int:
        return sum(one.size_bytes for one in self.places)

    @property
    def moved_bytes(self) -> int:
        return sum(one.size_bytes for one in self.places if one.treatment is Treatment.MOVED)

    @property
    def added(self) -> float:
        """Of the round."""
        return self.added_ms / self.length_ms if self.length_ms else 0.0

    @property
    def link_out(self) -> float:
        """The part of what the link could carry out in the round that it does carry."""
        return self._use(self.d2h_bytes_per_ms)

    @property
    def link_in(self) -> float:
        """The same of the way back."""
        return self._use(self.h2d_bytes_per_ms)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.room_bytes

    @property
    def is_beyond(self) -> bool:
        """Whether the size lies outside of those that were seen, where all goes on in proportion."""
        return self.known_sizes is not None and not self.known_sizes[0] <= self.size <= self.known_sizes[1]

    def of_unit(self, unit: str) -> list[SavedPlace]:
        return [one for one in self.places if one.place.site.unit == unit]

    def _use(self, bytes_per_ms: float) -> float:
        time_ms = self.length_ms + self.added_ms
        return self.moved_bytes / (bytes_per_ms * time_ms) if time_ms else 0.0


@dataclass(frozen=True)
class UnitDifference:
    """A unit of which two plans move different parts."""

    unit: str
    moved_bytes: tuple[int, int]
    saved_bytes: tuple[int, int]
    recomputed: tuple[bool, bool]


def what_if(file: PlanFile, settings: Settings, *, overheads: Sequence[float] = OVERHEADS) -> WhatIf:
    """The plan under ``settings``, as it would be made from the file's rounds, and the curve of what time buys.

    Raises:
        PlanFileError: memory was not looked at in any of the file's rounds, or there is no plan by size.
    """
    known = [(size, caution, list(_on_link(rounds, settings.link))) for size, caution, rounds in file.known()]
    _refuse(known, settings)
    tuner = Tuner(None, _NoDevice(settings.device_bytes or NEVER))
    tuner.learn(known)
    forecast, profile, _ = tuner.made_for(settings.goal, settings.size)
    curve: list[CurvePoint] = []
    for overhead in (*overheads, None):
        point = _curve_point(overhead, *tuner.made_for(_may_add(settings.goal, overhead), settings.size)[:2])
        worse = bool(curve) and point.freed_bytes < curve[-1].freed_bytes
        curve.append(replace(curve[-1], max_overhead=overhead) if worse else point)
    sizes = [profile.sizes[0] for profile in _profiles(known) if len(profile.sizes) == 1]
    return WhatIf(
        settings,
        profile.sizes[0] if profile.sizes else 0,
        (min(sizes), max(sizes)) if sizes and profile.sizes else None,
        forecast.points,
        list(_places(forecast.points, profile)),
        list(dict.fromkeys([*file.model.units, *(passed.moment.place.site.unit for passed in _saves(profile))])),
        frozenset(name for name, unit in file.model.units.items() if unit.recompute),
        profile.length_ms,
        forecast.stalled_ms,
        profile.peak_bytes,
        forecast.peak_bytes,
        tuner.room_bytes(),
        profile.d2h_bytes_per_ms,
        profile.h2d_bytes_per_ms,
        curve,
        forecast.verdict,
    )


def differences(one: WhatIf, other: WhatIf) -> Iterator[UnitDifference]:
    """Units that the two plans treat differently; where sizes differ, of which they move another part."""
    for unit in dict.fromkeys([*one.units, *other.units]):
        moved, saved = zip(*(_moved_and_saved(each, unit) for each in (one, other)), strict=True)
        recomputed = unit in one.recomputed, unit in other.recomputed
        if recomputed[0] != recomputed[1] or _moved_sites(one, unit) != _moved_sites(other, unit):
            yield UnitDifference(unit, moved, saved, recomputed)


class _NoDevice(Recorder):
    """Stands where a device tells the tuner of its rounds: all that is asked of it is how much memory there is."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(SynchronousStreams(torch.device("cpu")), lambda: None)
        self._memory_bytes = memory_bytes

    def total_bytes(self) -> int:
        return self._memory_bytes


def _on_link(rounds: Iterable[Recorded], link: Link) -> Iterator[Recorded]:
    for recorded in rounds:
        profile = recorded.profile
        yield replace(
            recorded,
            profile=replace(
                profile,
                d2h_bytes_per_ms=link.of(profile.d2h_bytes_per_ms),
                h2d_bytes_per_ms=link.of(profile.h2d_bytes_per_ms),
            ),
        )


def _refuse(known: Known, settings: Settings) -> None:
    if not any(recorded.with_memory for _, _, rounds in known for recorded in rounds):
        raise PlanFileError(
            "memory was not looked at in any of its rounds, as in runs with policy all, so that nothing can be said of "
            "the peak; have it written by a run with policy auto"
        )
    if settings.size is not None and any(len(profile.sizes) != 1 for profile in _profiles(known)):
        raise PlanFileError(
            "several micro-batches are in flight in its rounds: how they change with the size is not known; leave the "
            "size out"
        )


def _profiles(known: Known) -> list[RoundProfile]:
    return [recorded.profile for _, _, rounds in known for recorded in rounds]


def _may_add(goal: PlanGoal, overhead: float | None) -> PlanGoal:
    return replace(goal, max_overhead=NO_LIMIT if overhead is None else overhead, target_saved_bytes=None)


def _curve_point(overhead: float | None, forecast: Forecast, profile: RoundProfile) -> CurvePoint:
    return CurvePoint(
        overhead,
        overhead,
        forecast.peak_bytes,
        profile.peak_bytes - forecast.peak_bytes,
        sum(one.size_bytes for one in _places(forecast.points, profile) if one.treatment is Treatment.MOVED),
        forecast.stalled_ms,
        forecast.stalled_ms / profile.length_ms if profile.length_ms else 0.0,
    )


def _saves(profile: RoundProfile) -> list[ProfiledMoment]:
    return [passed for passed in profile.passed if passed.moment.kind is Kind.SAVED and passed.size_bytes]


def _places(points: Points, profile: RoundProfile) -> Iterator[SavedPlace]:
    passed = profile.passed
    begin_ms = passed[0].at_ms

    def at_ms(position: int | None) -> float | None:
        return None if position is None else passed[position].at_ms - begin_ms

    for saved in _saves(profile):
        place = saved.moment.place
        release = points.release.get(place)
        kept = Treatment.HELD if place in profile.held else Treatment.KEPT
        yield SavedPlace(
            place,
            saved.size_bytes,
            kept if release is None else Treatment.MOVED,
            saved.at_ms - begin_ms,
            at_ms(points.positions.get(Moment(Kind.NEEDED, place))),
            at_ms(release),
            None if release is None else at_ms(points.reload[place]),
        )


def _moved_and_saved(plan: WhatIf, unit: str) -> tuple[int, int]:
    places = plan.of_unit(unit)
    return (
        sum(one.size_bytes for one in places if one.treatment is Treatment.MOVED),
        sum(one.size_bytes for one in places),
    )


def _moved_sites(plan: WhatIf, unit: str) -> set[Place]:
    return {one.place for one in plan.of_unit(unit) if one.treatment is Treatment.MOVED}
