"""What each optimizer step has moved, as numbers for DeepSpeed's monitors."""

from __future__ import annotations

from collections.abc import Mapping

from ds_fgoffload.report import RankCounts

_PER_STEP = (
    "saved_bytes",
    "offloaded_bytes",
    "reloaded_bytes",
    "used_in_place_bytes",
    "held_bytes",
    "kept_bytes",
    "recomputed_bytes",
    "late_reloads",
)


class StepLog:
    """Turns counts since the beginning into counts of a step.

    Args:
        report_after_steps: the step after which the report is due; 0: none.
    """

    def __init__(self, report_after_steps: int) -> None:
        self._report_after_steps = report_after_steps
        self._steps = 0
        self._before: dict[str, int] = dict.fromkeys(_PER_STEP, 0)

    @property
    def report_is_due(self) -> bool:
        """Whether the step that was taken last is the one after which the report is printed."""
        return self._steps == self._report_after_steps > 0

    def step_taken(self, counts: RankCounts) -> Mapping[str, float]:
        """A step has ended with these counts: what it added, and the state of the host pool."""
        self._steps += 1
        now = {name: getattr(counts.offload, name) for name in _PER_STEP}
        step = {name: float(now[name] - self._before[name]) for name in _PER_STEP}
        self._before = now
        pool = counts.pool
        return {
            **step,
            "pool_pinned_bytes": float(pool.pinned_bytes),
            "pool_leased_bytes": float(pool.leased_bytes),
            "pool_peak_leased_bytes": float(pool.peak_leased_bytes),
        }
