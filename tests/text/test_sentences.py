"""What is told of the times of training on a device in virtual time: in stats, report and monitors."""

from __future__ import annotations

import pytest

from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings
from ds_fgoffload.planning.planner import PlanGoal
from ds_fgoffload.reporting.report import RankCounts, render
from ds_fgoffload.reporting.step_log import StepLog
from ds_fgoffload.schedule.plan import Action, Plan
from tests.helpers.simulated import Training

LAYER_BYTES = 4000
LAYERS = 8
LINK = 2500
WAITING = PlanGoal(max_overhead=0.1)


def counts(training: Training) -> RankCounts:
    pool = HostPool(HostPoolSettings(1 << 20, pin_memory=False))
    return RankCounts(0, training.offloader.stats(), pool.stats())


def remarks(training: Training, about: str) -> list[str]:
    return [line for line in render([counts(training)]).splitlines() if about in line]


def test_the_rate_is_that_of_the_link_from_the_first_round_on() -> None:
    training = Training(goal=WAITING, link_bytes_per_ms=LINK)
    for _ in range(3):
        training.step()
        stats = training.offloader.stats()
        assert stats.timed_out_bytes == pytest.approx(LINK * stats.copying_out_ms)
        assert stats.timed_in_bytes == pytest.approx(LINK * stats.copying_in_ms)
    assert 0 < stats.timed_out_bytes < stats.offloaded_bytes  # the last round is not over


def test_the_plan_that_is_told_is_what_the_next_step_does() -> None:
    training = Training(goal=WAITING, link_bytes_per_ms=LINK)
    found = training.steady()
    planned = training.offloader.stats().rounds.planned
    assert planned.copied_bytes == found.offloaded_bytes < planned.saved_bytes == LAYERS * LAYER_BYTES
    assert planned.stalled_ms == pytest.approx(found.waited_ms, abs=0.3)
    assert planned.stalled_ms > 0
    without = Training(plan=Plan(default=Action.KEEP, sites={"": ""})).steady()
    fell_bytes = planned.peak_without_bytes - planned.peak_bytes
    assert abs(fell_bytes - (without.peak_bytes - found.peak_bytes)) <= LAYER_BYTES
    (line,) = remarks(training, "planned")
    assert line.startswith(f"rank 0: planned: {found.offloaded_bytes / 1024:.1f} KiB of 31.2 KiB a round are copied, ")
    assert f"compute waits {planned.stalled_ms:.1f} of " in line


def test_no_plan_is_told_where_there_is_none() -> None:
    training = Training(goal=None, link_bytes_per_ms=LINK)
    training.steady()
    assert remarks(training, "planned") == []
    assert remarks(training, "GB/s out") != []


def test_reads_are_told_with_what_copies_cost_them() -> None:
    """By windows the copy of each layer's input delays its read; the plan copies nothing that would."""
    training = Training(goal=PlanGoal(max_overhead=0.0), link_bytes_per_ms=5000, reads=True)
    without_ms = Training(plan=Plan(default=Action.KEEP, sites={"": ""}), reads=True).steady().took_ms
    delayed_ms = 0.0
    for _ in range(12):
        before_ms = training.streams.clocks_ms["compute"]
        training.step()
        delayed_ms += training.streams.clocks_ms["compute"] - before_ms - without_ms
    reads = training.offloader.stats().rounds.reads
    assert {(read.after_unit, read.before_unit) for read in reads} == {(str(n), str(n)) for n in range(LAYERS)}
    assert delayed_ms > 5
    assert sum(read.waited_ms for read in reads) == pytest.approx(delayed_ms)
    assert all(read.last_waited_ms == 0 for read in reads)
    (line,) = remarks(training, "the device was read within {0..7}: copies kept it waiting")
    assert line.endswith(" ms a round, 0.0 ms in the last that was looked at")


def test_monitors_get_the_times_of_each_step() -> None:
    training = Training(goal=WAITING, link_bytes_per_ms=LINK)
    log = StepLog(0)
    waited_ms = told_ms = 0.0
    for _ in range(12):
        waited_ms = training.streams.waited_ms
        training.step()
        numbers = log.added(counts(training))
        told_ms += numbers.get("stalled_ms", 0.0)
    assert told_ms == pytest.approx(waited_ms)  # one round behind
    assert numbers["out_gb_s"] == pytest.approx(LINK / 1e6)
    assert numbers["in_gb_s"] == pytest.approx(LINK / 1e6)
    planned = training.offloader.stats().rounds.planned
    assert numbers["planned_copied_bytes"] == planned.copied_bytes
    assert numbers["planned_peak_saved_bytes"] == planned.peak_without_bytes - planned.peak_bytes
    assert numbers["copying_out_ms"] == pytest.approx(planned.copied_bytes / LINK)
    assert numbers["reads_waited_ms"] == 0


def test_where_nothing_is_timed_nothing_of_it_is_told() -> None:
    training = Training(plan=Plan(default=Action.KEEP, sites={"": ""}))
    log = StepLog(0)
    for _ in range(3):
        training.step()
        numbers = log.added(counts(training))
    assert not any(word in name for name in numbers for word in ("_ms", "gb_s", "planned"))
    assert remarks(training, "GB/s") == remarks(training, "planned") == remarks(training, "was read") == []
