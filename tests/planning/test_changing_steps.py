"""Steps that are never alike, in virtual time: what is freed and waited for, against plans made for each step alone."""

import itertools
import random

import pytest

from ds_fgoffload.planning.planner import PlanGoal
from tests.helpers.changing import KINDS, clairvoyant, measured

LEARNING = 30
OF_CLAIRVOYANT = 0.9
MARGIN = 0.005


@pytest.mark.parametrize("max_overhead", [0.0, 0.02])
@pytest.mark.parametrize(
    "kind",
    [
        "uniform lengths",
        "three buckets",
        "expert counts within 5%",
        "expert counts within 50%",
        "mixed micro-batches",
        "sites that come and go",
    ],
)
def test_changing_steps_free_nearly_what_plans_for_each_would(kind, max_overhead):
    steps = list(itertools.islice(KINDS[kind](random.Random(0)), LEARNING + 60))
    goal = PlanGoal(max_overhead=max_overhead)
    best, found = (run(steps, goal, 6000.0, LEARNING) for run in (clairvoyant, measured))
    assert best.freed_bytes > 0
    assert found.freed_bytes >= OF_CLAIRVOYANT * best.freed_bytes
    assert found.waited <= max_overhead + MARGIN


def test_all_at_once():
    """Lengths, experts and units that come and go: fewer rounds are like one another than are known of a class."""
    steps = list(itertools.islice(KINDS["all at once"](random.Random(0)), LEARNING + 60))
    best, found = (run(steps, PlanGoal(max_overhead=0.0), 6000.0, LEARNING) for run in (clairvoyant, measured))
    assert found.freed_bytes >= 0.85 * best.freed_bytes
    assert found.waited <= MARGIN


def test_lengths_that_were_not_seen_before_cost_little():
    draw = random.Random(1)
    kind = KINDS["uniform lengths"]
    steps = list(itertools.islice(kind(draw), 40))
    longer = [type(work)(2 * work.tokens, work.shares) for work in itertools.islice(kind(draw), 20)]
    found = measured(steps + longer, PlanGoal(max_overhead=0.0), 6000.0, 40)
    assert found.waited <= MARGIN
