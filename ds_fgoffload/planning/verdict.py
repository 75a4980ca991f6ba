"""Whether offloading pays in these rounds, in numbers; if it does not, why, and what would."""

from __future__ import annotations

from dataclasses import replace

from ds_fgoffload.planning.planner import Forecast, PlanGoal, plan_round
from ds_fgoffload.profiling.profile import RoundProfile
from ds_fgoffload.schedule.plan import Kind
from ds_fgoffload.text.sizes import human

WORTH_FREEING = 0.01
"""Of the peak: less is not worth the host memory, nor the time that hooks take."""
MORE_OVERHEAD = 0.05
"""It is tried whether so much more time would help."""


def verdict(profile: RoundProfile, forecast: Forecast, goal: PlanGoal) -> str | None:
    """Why ``forecast`` does not pay; None: it does, or there is no choice, since the device is too small.

    Args:
        profile: the round that was planned for, with memory.
        forecast: of the best plan.
        goal: what is allowed and asked for.
    """
    peak_bytes = profile.peak_bytes
    freed_bytes = peak_bytes - forecast.peak_bytes
    enough_bytes = WORTH_FREEING * peak_bytes
    if goal.target_saved_bytes is not None:
        enough_bytes = min(enough_bytes, goal.target_saved_bytes)
    is_too_large = goal.room_bytes is not None and peak_bytes > goal.room_bytes
    if goal.everything or is_too_large or freed_bytes >= enough_bytes:
        return None
    return (
        f"offloading does not pay here, and nothing is moved: it would free {human(freed_bytes)} of a peak of "
        f"{human(peak_bytes)} ({freed_bytes / peak_bytes:.1%}), since {_reason(profile, goal, enough_bytes)}"
    )


def _reason(profile: RoundProfile, goal: PlanGoal, enough_bytes: float) -> str:
    at_peak_bytes, held_bytes = _saved_at_the_peak(profile)
    if at_peak_bytes < enough_bytes:
        return (
            f"at the peak the chosen modules hold {human(at_peak_bytes)} for backward; choose other modules "
            "(ds-fgoffload inspect shows which save most), or leave it out: the rest is weights, gradients, optimizer "
            "state or what other modules save"
        )
    if at_peak_bytes - held_bytes < enough_bytes:
        return (
            f"of the {human(at_peak_bytes)} that the chosen modules hold for backward at the peak something else keeps "
            f"{human(held_bytes)} on the device; choose the modules around them as well, or leave it out"
        )
    carried_bytes = round(profile.d2h_bytes_per_ms * profile.length_ms)
    link = f"the link carries {human(carried_bytes)} in the {profile.length_ms:.1f} ms of a round"
    overhead = (goal.max_overhead or 0.0) + MORE_OVERHEAD
    more = plan_round(profile, replace(goal, max_overhead=overhead))
    if profile.peak_bytes - more.peak_bytes >= enough_bytes:
        return (
            f"{link}, and nothing large is back in time; with max_overhead {overhead:g} the peak would fall by "
            f"{human(profile.peak_bytes - more.peak_bytes)}, or recompute what is cheap (recompute)"
        )
    return f"{link}, and nothing large is back in time; recompute modules instead (recompute), or checkpoint layers"


def _saved_at_the_peak(profile: RoundProfile) -> tuple[int, int]:
    """What is saved and not needed yet at the moment of the peak, and what of it something else holds."""
    peak = max(range(len(profile.passed)), key=lambda position: profile.passed[position].memory_bytes)
    alive = {}
    for passed in profile.passed[:peak]:
        kind, place = passed.moment
        if kind is Kind.SAVED and passed.size_bytes:
            alive[place] = passed.size_bytes
        elif kind is Kind.NEEDED:
            alive.pop(place, None)
    return sum(alive.values()), sum(size_bytes for place, size_bytes in alive.items() if place in profile.held)
