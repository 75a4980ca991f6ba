"""Chooses, from a recorded round, what is worth a copy, and when it can leave the device and must be on its way back.

A place leaves at the first moment after its copy is over, so that compute never waits for it, and comes back at the
last moment from which the copy is over in time. The time between is its *absence*; a place is worth a copy if its
absence covers a moment at which memory would otherwise be at its peak.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from ds_fgoffload.planning.simulator import Outcome, Round
from ds_fgoffload.profiling.profile import RoundProfile
from ds_fgoffload.schedule.plan import Place, Points


@dataclass(frozen=True, kw_only=True)
class PlanGoal:
    """What the user allows and asks for."""

    everything: bool = False
    """Every place is copied, and the release window holds as well."""
    max_overhead: float | None = None
    """Time that may be added, as a fraction of the round; None: none, or what the target takes."""
    target_saved_bytes: int | None = None
    """Bytes by which the peak is to fall; no more is copied than that takes."""
    room_bytes: int | None = None
    """Device memory that there is. The peak is brought below it whatever that costs."""


class Forecast(NamedTuple):
    """What a plan is expected to do."""

    points: Points
    peak_bytes: int
    """Highest memory at a moment of the round; without offloading it is the profile's."""
    stalled_ms: float
    copied_bytes: int
    verdict: str | None = None
    """Why offloading does not pay, and nothing moves; None: it does."""


def plan_round(profile: RoundProfile, goal: PlanGoal, *, caution: float = 1.0) -> Forecast:
    """The points for rounds that go like the recorded one.

    Args:
        profile: the round.
        goal: what is allowed and asked for.
        caution: by how much copies are taken to be slower than was measured, and spare times longer.
    """
    the_round = Round(profile, caution)
    if goal.everything:
        outcome = the_round.simulate(the_round.candidates, in_time_only=False)
        return _forecast(the_round, outcome, moved=None)
    ranked = the_round.ranked(profile.held)
    best = the_round.lowest_peak(ranked)
    free = the_round.simulate(best)
    choices = (best, set(ranked))
    limit_bytes = 0
    if goal.max_overhead is not None or goal.target_saved_bytes is None:
        allowed_ms = (goal.max_overhead or 0.0) * profile.length_ms
        limit_bytes = min(the_round.least_peak(chosen, free.peak_bytes, allowed_ms) for chosen in choices)
    if goal.target_saved_bytes is not None:
        limit_bytes = max(limit_bytes, profile.peak_bytes - goal.target_saved_bytes)
    if goal.room_bytes is not None:
        limit_bytes = min(limit_bytes, goal.room_bytes)
    found, in_time_only, presses = free, True, limit_bytes < free.peak_bytes
    if presses:
        tried = [
            (the_round.simulate(chosen, limit_bytes, in_time_only=in_time_only), in_time_only)
            for in_time_only in (True, False)
            for chosen in choices
        ]
        found, in_time_only = min(
            tried, key=lambda one: (max(limit_bytes, one[0].peak_bytes), not one[1], one[0].stalled_ms)
        )
    limit_bytes = max(limit_bytes, found.peak_bytes)
    useful = the_round.useful(found, limit_bytes)
    final = the_round.fewest(
        [number for number in ranked if number in useful],
        limit_bytes,
        allowed_ms=found.stalled_ms,
        in_time_only=in_time_only,
        presses=presses,
    )
    return _forecast(the_round, final, moved=frozenset(final.absences))


def _forecast(the_round: Round, outcome: Outcome, *, moved: AbstractSet[Place] | None) -> Forecast:
    points = Points(the_round.positions, outcome.release, outcome.reload, moved, within_window=moved is None)
    return Forecast(points, outcome.peak_bytes, outcome.stalled_ms, outcome.copied_bytes)
