"""Where offloading does not pay it says so, with its reason, and nothing moves; and prediction is checked."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from ds_fgoffload.planning import tuner as tuner_module
from ds_fgoffload.planning.planner import PlanGoal, plan_round
from ds_fgoffload.planning.verdict import verdict
from ds_fgoffload.text.sentences import sentences
from tests.helpers.changing import ALL, KINDS, Training, Work, profiles_of

LINK = 6000.0
STEPS = [Work(8192, ALL)] * 20
SAVED_BYTES = 12 * 8192


@pytest.fixture
def said(monkeypatch):
    messages = []
    monkeypatch.setattr(tuner_module, "warn", messages.append)
    return messages


def trained(weights_bytes, goal=PlanGoal(max_overhead=0.0), link=LINK, steps=STEPS):  # noqa: B008
    training = Training(goal, link)
    training.weights = torch.empty(weights_bytes, dtype=torch.uint8)
    training.streams._made(training.weights)
    for work in steps[:-5]:
        training.step(work)
    training.streams.peak_bytes = 0
    training.late_bytes = training.offloader.stats().offloaded_bytes
    for work in steps[-5:]:
        training.step(work)
    training.late_bytes = training.offloader.stats().offloaded_bytes - training.late_bytes
    return training


def test_where_weights_are_nearly_all_nothing_moves(said):
    weights_bytes = 200 * SAVED_BYTES
    training = trained(weights_bytes)
    (message,) = said
    assert message.startswith(
        "fine_grained_offload: offloading does not pay here, and nothing is moved: it would free 80.0 KiB of a peak of "
        "18.8 MiB (0.4%), since at the peak the chosen modules hold 88.0 KiB for backward; choose other modules"
    )
    assert training.late_bytes == 0
    assert sentences(training.offloader.stats().rounds) == [message.removeprefix("fine_grained_offload: ")]
    # And that was right: with everything moved the peak is not lower by one per cent.
    everything = trained(weights_bytes, PlanGoal(everything=True))
    assert everything.late_bytes == 5 * SAVED_BYTES
    assert everything.streams.peak_bytes > 0.99 * training.streams.peak_bytes


def test_where_it_pays_nothing_is_said(said):
    training = trained(10 * SAVED_BYTES)
    assert training.late_bytes > 0
    assert said == []
    assert training.offloader.stats().rounds.planned.verdict is None


def test_a_link_that_is_too_slow(said):
    training = trained(10 * SAVED_BYTES, link=200.0)
    (message,) = said
    assert "the link carries" in message
    assert training.late_bytes == 0


def test_it_is_looked_at_again(said):
    """Longer micro-batches save more."""
    training = trained(80 * SAVED_BYTES, steps=[Work(4096, ALL)] * 12)
    assert len(said) == 1
    assert training.late_bytes == 0
    before_bytes = training.offloader.stats().offloaded_bytes
    for work in [Work(3 * 8192, ALL)] * 20:
        training.step(work)
    assert training.offloader.stats().offloaded_bytes > before_bytes
    assert training.offloader.stats().rounds.planned.verdict is None


@pytest.fixture(scope="module")
def profile():
    (found,) = profiles_of([Work(8192, ALL)], LINK)
    return found


def with_more(profile, more_bytes):
    passed = [each._replace(memory_bytes=each.memory_bytes + more_bytes) for each in profile.passed]
    return replace(profile, passed=passed)


def said_of(profile, goal=PlanGoal()):  # noqa: B008
    return verdict(profile, plan_round(profile, goal), goal)


def test_what_is_held_by_something_else(profile):
    held = frozenset(passed.moment.place for passed in profile.passed if passed.size_bytes)
    said = said_of(replace(with_more(profile, 10 * SAVED_BYTES), held=held))
    assert "of the 88.0 KiB that the chosen modules hold for backward at the peak something else keeps 88.0 KiB" in said


@pytest.mark.parametrize(
    ("rate", "remedy"),
    [
        (300.0, "recompute modules instead (recompute), or checkpoint layers"),
        (1200.0, "with max_overhead 0.05 the peak"),
    ],
)
def test_what_would_help(profile, rate, remedy):
    slow = replace(with_more(profile, 10 * SAVED_BYTES), d2h_bytes_per_ms=rate, h2d_bytes_per_ms=rate)
    goal = PlanGoal()
    nothing = plan_round(slow, goal)._replace(peak_bytes=slow.peak_bytes)
    assert remedy in verdict(slow, nothing, goal)


@pytest.mark.parametrize(
    "goal",
    [
        PlanGoal(everything=True),
        PlanGoal(room_bytes=150 * SAVED_BYTES),  # too small: there is no choice
        PlanGoal(target_saved_bytes=SAVED_BYTES // 4),  # reached
    ],
)
def test_where_there_is_no_choice_or_it_does_as_it_is_told(profile, goal):
    large = with_more(profile, 200 * SAVED_BYTES)
    assert said_of(large) is not None
    assert said_of(large, goal) is None


@pytest.mark.parametrize("max_overhead", [0.0, 0.02])
@pytest.mark.parametrize("kind", ["uniform lengths", "three buckets", "expert counts within 5%", "mixed micro-batches"])
def test_what_was_foreseen_is_measured(kind, max_overhead):
    steps = list(itertools.islice(KINDS[kind](random.Random(3)), 60))
    training = trained(10 * SAVED_BYTES, PlanGoal(max_overhead=max_overhead), steps=steps)
    measured = training.offloader.stats().rounds.measured
    assert measured.saved_bytes == pytest.approx(measured.foreseen_saved_bytes, rel=0.05)
    assert measured.peak_bytes == pytest.approx(measured.foreseen_peak_bytes, rel=0.05)
    assert abs(measured.stalled_ms - measured.foreseen_stalled_ms) <= 0.01 * measured.length_ms
    said = sentences(training.offloader.stats().rounds)[1]
    assert said.startswith("measured in a round: ")
    assert said.endswith("% of the round)")
