"""What each optimizer step has moved, as numbers for DeepSpeed's monitors."""

from __future__ import annotations

from collections.abc import Mapping

from ds_fgoffload.reporting.report import RankCounts
from ds_fgoffload.stats import OffloadStats, rate_gb_s

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
_TIMES_PER_STEP = ("stalled_ms", "copying_out_ms", "copying_in_ms", "timed_out_bytes", "timed_in_bytes")


class StepLog:
    """Turns counts since the beginning into counts of a step.

    Args:
        report_after_steps: the step after which the report is due; 0: none.
    """

    def __init__(self, report_after_steps: int) -> None:
        self._report_after_steps = report_after_steps
        self._steps = 0
        self._before: dict[str, float] = {}

    @property
    def report_is_due(self) -> bool:
        """Whether the step that was taken last is the one after which the report is printed."""
        return self._steps == self._report_after_steps > 0

    def step_taken(self) -> None:
        """A step has ended."""
        self._steps += 1

    def added(self, counts: RankCounts) -> Mapping[str, float]:
        """What was added since the last call, now that these are the counts; the state of the host pool, the plan.

        Times are those of the rounds that the device was found to have passed since the step before, a round or two
        behind. On a device without streams there are none.
        """
        now = {name: float(getattr(counts.offload, name)) for name in (*_PER_STEP, *_TIMES_PER_STEP)}
        now["reads_waited_ms"] = sum(read.waited_ms for read in counts.offload.rounds.reads)
        added = {name: number - self._before.get(name, 0.0) for name, number in now.items()}
        self._before = now
        pool = counts.pool
        return {
            **{name: added[name] for name in _PER_STEP},
            **(_times(added, counts.offload) if counts.offload.timed_out_bytes else {}),
            "pool_pinned_bytes": float(pool.pinned_bytes),
            "pool_leased_bytes": float(pool.leased_bytes),
            "pool_peak_leased_bytes": float(pool.peak_leased_bytes),
        }


def _times(added: Mapping[str, float], offload: OffloadStats) -> dict[str, float]:
    rates = {
        "out_gb_s": rate_gb_s(added["timed_out_bytes"], added["copying_out_ms"]),
        "in_gb_s": rate_gb_s(added["timed_in_bytes"], added["copying_in_ms"]),
    }
    times = {name: added[name] for name in ("stalled_ms", "copying_out_ms", "copying_in_ms", "reads_waited_ms")}
    times |= {name: rate for name, rate in rates.items() if rate is not None}
    planned = offload.rounds.planned
    if planned is not None:
        times |= {"planned_copied_bytes": float(planned.copied_bytes), "planned_stalled_ms": planned.stalled_ms}
        if planned.freed_bytes is not None:
            times["planned_peak_saved_bytes"] = float(planned.freed_bytes)
    return times
