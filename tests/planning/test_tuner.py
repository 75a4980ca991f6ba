"""Training on a device in virtual time: what is planned from the first rounds, and what the next ones are like then."""

import pytest
import torch

from ds_fgoffload.planning import tuner as tuner_module
from ds_fgoffload.planning.planner import PlanGoal
from ds_fgoffload.planning.tuner import Tuner
from ds_fgoffload.schedule.plan import Action, Plan
from tests.helpers.simulated import Training

NOTHING = Plan(default=Action.KEEP, sites={"": ""})
LAYER_BYTES = 4000
FREE = PlanGoal(max_overhead=0.0)


def plain(**shape):
    return Training(plan=NOTHING, **shape).steady()


@pytest.mark.parametrize(
    ("link_bytes_per_ms", "fewest_bytes_freed"),
    [(20000, 5 * LAYER_BYTES), (5000, 4 * LAYER_BYTES), (2500, 2 * LAYER_BYTES)],
)
def test_what_the_link_carries_is_freed_and_costs_nothing(link_bytes_per_ms, fewest_bytes_freed):
    without, found = plain(), Training(goal=FREE, link_bytes_per_ms=link_bytes_per_ms).steady()
    assert without.peak_bytes - found.peak_bytes >= fewest_bytes_freed
    assert (found.waited_ms, found.late_reloads) == (0, 0)
    assert found.took_ms == pytest.approx(without.took_ms)
    assert torch.equal(found.gradient, without.gradient)


def test_windows_stall_where_points_do_not():
    by_windows = Training(goal=None, link_bytes_per_ms=2500).steady()
    by_points = Training(goal=FREE, link_bytes_per_ms=2500).steady()
    assert by_windows.waited_ms > 3
    assert by_points.waited_ms == 0


def test_more_time_buys_more_memory():
    free = Training(goal=FREE, link_bytes_per_ms=2500).steady()
    bought = Training(goal=PlanGoal(max_overhead=0.1), link_bytes_per_ms=2500).steady()
    assert bought.peak_bytes <= free.peak_bytes - LAYER_BYTES
    assert 0 < bought.waited_ms <= 0.1 * plain().took_ms


def test_no_more_is_copied_than_the_target_takes():
    goal = PlanGoal(target_saved_bytes=2 * LAYER_BYTES)
    found = Training(goal=goal, link_bytes_per_ms=20000).steady()
    assert plain().peak_bytes - found.peak_bytes >= 2 * LAYER_BYTES
    assert found.offloaded_bytes <= 3 * LAYER_BYTES


def test_a_target_is_reached_also_if_compute_has_to_wait_for_it():
    goal = PlanGoal(target_saved_bytes=2 * LAYER_BYTES)
    found = Training(goal=goal, link_bytes_per_ms=1000).steady()
    assert plain().peak_bytes - found.peak_bytes >= 2 * LAYER_BYTES
    assert found.waited_ms > 0


def test_a_device_that_is_too_small_for_the_free_plan_gets_a_dearer_one():
    roomy = Training(goal=FREE, link_bytes_per_ms=2500).steady()
    tight = Training(goal=FREE, link_bytes_per_ms=2500, total_bytes=roomy.peak_bytes - LAYER_BYTES).steady()
    assert tight.peak_bytes < roomy.peak_bytes
    assert tight.waited_ms > 0


def test_memory_is_known_at_all_moments_of_a_round_or_at_none(monkeypatch):
    training, rounds = Training(goal=FREE, link_bytes_per_ms=5000), []
    consider = Tuner._consider
    monkeypatch.setattr(Tuner, "_consider", lambda tuner, one: (rounds.append(one), consider(tuner, one)))
    training.steady(20)
    del training.model[6:]  # measured anew
    training.steady(20)
    assert {one.with_memory for one in rounds} == {True, False}
    for one in rounds:
        away_at_most = sum(passed.size_bytes for passed in one.profile.passed)
        known = [passed.memory_bytes > 0 for passed in one.profile.passed]
        assert all(known) if one.with_memory else one.profile.peak_bytes <= away_at_most


def test_a_peak_of_long_ago_takes_no_room():
    """torch's peak is that since the process began, or since the user has reset it."""
    roomy = Training(goal=FREE, link_bytes_per_ms=2500).steady()
    training = Training(goal=FREE, link_bytes_per_ms=2500, total_bytes=2 * roomy.peak_bytes)
    training.streams.peak_bytes = 2 * roomy.peak_bytes
    found = training.steady()
    assert (found.peak_bytes, found.waited_ms) == (roomy.peak_bytes, 0)


def test_everything_is_copied_if_that_is_wished():
    found = Training(goal=PlanGoal(everything=True), link_bytes_per_ms=5000).steady()
    assert found.offloaded_bytes == 8 * LAYER_BYTES
    assert (found.waited_ms, found.late_reloads) == (0, 0)


@pytest.mark.parametrize("read_ms", [0.0, 0.1, 0.2])
@pytest.mark.parametrize(("link_bytes_per_ms", "copied"), [(20000, True), (5000, False)])
def test_reads_of_the_device_do_not_wait_for_copies(link_bytes_per_ms, copied, read_ms):
    """Half a millisecond passes between a save and the next read, in which the slow link carries no layer."""

    def training(**more):
        made = Training(reads=True, **more)
        made.streams.read_ms = read_ms
        return made

    without = training(plan=NOTHING).steady()
    found = training(goal=FREE, link_bytes_per_ms=link_bytes_per_ms).steady(20)
    assert found.took_ms == pytest.approx(without.took_ms)
    assert (found.offloaded_bytes > 0) == copied
    eager = training(goal=None, link_bytes_per_ms=link_bytes_per_ms).steady()
    assert (eager.took_ms > without.took_ms + 1) != copied


def test_what_was_read_in_the_first_round_alone_does_not_decide_the_next():
    """Units under ``recompute`` are tried in it, and compared bit by bit."""
    training = Training(goal=FREE, link_bytes_per_ms=5000, reads=True)
    training.step()
    for layer in training.model:
        layer.reads = False
    assert training.steady().offloaded_bytes == Training(goal=FREE, link_bytes_per_ms=5000).steady().offloaded_bytes


def test_what_took_long_in_the_first_round_does_not_decide_the_next():
    training = Training(goal=FREE, link_bytes_per_ms=5000)
    for layer in training.model:
        layer.ms *= 50
    training.step()
    for layer in training.model:
        layer.ms /= 50
    found = training.steady()
    assert (found.waited_ms, found.late_reloads) == (0, 0)


def test_layers_that_become_faster_are_planned_anew():
    training = Training(goal=FREE, link_bytes_per_ms=5000)
    training.steady(20)
    for layer in training.model:
        layer.ms /= 4
    assert training.steady(40).waited_ms == 0


@pytest.mark.parametrize(("link_bytes_per_ms", "reads"), [(2500, False), (20000, True)])
def test_time_that_may_be_added_is_less_where_rounds_become_shorter(link_bytes_per_ms, reads):
    training = Training(goal=PlanGoal(max_overhead=0.1), link_bytes_per_ms=link_bytes_per_ms, reads=reads)
    training.steady(40)
    for layer in training.model:
        layer.ms /= 4
    training.streams.link_bytes_per_ms *= 1 if reads else 3
    found = training.steady(60)
    assert found.took_ms <= 1.1 * plain(layer_ms=0.25, reads=reads).took_ms


def test_layers_that_become_slower_leave_the_link_more_time_in_the_end():
    training = Training(goal=FREE, link_bytes_per_ms=2500)
    before = training.steady(20)
    for layer in training.model:
        layer.ms *= 2
    after = training.steady(60)
    assert (after.waited_ms, after.late_reloads) == (0, 0)
    assert after.peak_bytes < before.peak_bytes


@pytest.mark.parametrize(
    "lengths_ms", [(1.0, 1.1, 1.1), (0.9, 0.9, 0.9)], ids=["longer now and then", "shorter, but long enough"]
)
def test_rounds_of_other_lengths_that_wait_for_nothing_change_no_plan(lengths_ms):
    training = Training(goal=FREE, link_bytes_per_ms=20000)
    training.steady(20)
    forecast = training.offloader._tuner.forecast
    for number in range(24):
        for layer in training.model:
            layer.ms = lengths_ms[number % 3]
        training.step()
    assert training.offloader._tuner.forecast is forecast
    assert training.streams.emptied == 1


def test_another_structure_is_planned_anew():
    training = Training(goal=FREE, link_bytes_per_ms=20000)
    training.steady()
    del training.model[6:]
    assert training.steady(20).late_reloads == 0
    assert training.steady(0).offloaded_bytes < 6 * LAYER_BYTES


def test_another_structure_is_looked_at_in_every_round_also_where_a_plan_had_proved_right():
    training = Training(goal=FREE, link_bytes_per_ms=2500)
    training.steady(40)
    forecast = training.offloader._tuner.forecast
    del training.model[6:]
    training.steady(16)  # of the plan that had proved right, one round in eight is looked at
    assert training.offloader._tuner.forecast is not forecast


def test_the_cache_is_emptied_once_when_a_plan_has_taken_effect():
    training = Training(goal=FREE, link_bytes_per_ms=5000)
    training.steady(30)
    assert training.streams.emptied == 1
    for layer in training.model:
        layer.ms /= 4
    training.steady(40)
    assert training.streams.emptied > 1


def test_a_link_that_was_disturbed_at_first_carries_more_in_the_end():
    undisturbed = Training(goal=FREE, link_bytes_per_ms=5000).steady()
    training = Training(goal=FREE, link_bytes_per_ms=2500)
    disturbed = training.steady(20)
    assert disturbed.peak_bytes > undisturbed.peak_bytes
    training.streams.link_bytes_per_ms = 5000
    found = training.steady(2 * 12 * 8)
    assert (found.peak_bytes, found.waited_ms, found.late_reloads) == (undisturbed.peak_bytes, 0, 0)


def test_a_plan_that_could_be_little_better_stays(monkeypatch):
    monkeypatch.setattr(tuner_module, "WORTH_IT", 0.5)  # layers are too large here for less
    training = Training(goal=FREE, link_bytes_per_ms=2500)
    training.steady(20)
    forecast = training.offloader._tuner.forecast
    training.streams.link_bytes_per_ms = 5000
    training.steady(2 * 12 * 8)
    assert training.offloader._tuner.forecast is forecast


def test_waits_are_counted_by_unit():
    training = Training(goal=PlanGoal(everything=True), link_bytes_per_ms=2500)
    found = training.steady()
    waited_ms = training.streams.waited_ms
    training.step()
    units = training.offloader.stats().units
    assert found.waited_ms > 0
    assert sum(unit.stalled_ms for unit in units.values()) == pytest.approx(waited_ms)
    assert training.offloader.stats().copying_out_ms == pytest.approx(13 * 8 * LAYER_BYTES / 2500)


def test_nothing_is_planned_if_the_user_has_set_windows():
    training = Training(goal=None, plan=Plan(release_window_bytes=0))
    found = training.steady()
    assert training.offloader._tuner.forecast is None
    assert found.offloaded_bytes == 8 * LAYER_BYTES


def test_a_plan_that_has_proved_right_is_looked_at_now_and_then():
    training = Training(goal=PlanGoal(max_overhead=0.1), link_bytes_per_ms=2500)
    training.steady(20)
    fences = training.streams.fences
    waited_ms, told_ms = training.streams.waited_ms, training.offloader.stats().stalled_ms
    marks = []
    for _ in range(16):
        training.step()
        marks.append(training.streams.fences - fences)
        fences = training.streams.fences
    assert sum(count == max(marks) for count in marks) == 2
    assert max(marks) >= min(marks) + 8 * 3  # of each layer: its call, its save, its end
    # The rounds in which no moment is marked tell of their waits all the same, one round later.
    assert training.offloader.stats().stalled_ms - told_ms == pytest.approx(training.streams.waited_ms - waited_ms)


def test_where_nothing_is_copied_hardly_anything_is_looked_at(monkeypatch):
    training, asked = Training(plan=NOTHING, goal=FREE), []
    monkeypatch.setattr(training.streams, "peak_allocated_bytes", lambda: asked.append(1) or 0)
    training.steady(20)
    assert asked
    asked.clear()
    fences = training.streams.fences
    training.steady(16)
    assert not asked
    assert training.streams.fences - fences <= 3 * 5 * 8  # three rounds at most; of each layer its call, save, end, use


def test_a_round_that_is_fast_now_and_then_is_in_time_too():
    training = Training(goal=FREE, link_bytes_per_ms=5000)
    for number in range(24):
        for layer in training.model:
            layer.ms = 0.9 if number % 3 == 0 else 1.0
        training.step()
    for layer in training.model:
        layer.ms = 0.9
    assert training.steady(0).waited_ms == 0


@pytest.mark.parametrize("link_bytes_per_ms", [2600, 3600])
def test_layers_that_are_fast_in_turn_are_not_taken_for_a_round_in_which_all_are(link_bytes_per_ms):
    steady = Training(goal=FREE, link_bytes_per_ms=link_bytes_per_ms, layers=16).steady()
    training = Training(goal=FREE, link_bytes_per_ms=link_bytes_per_ms, layers=16)
    for number in range(25):
        for position, layer in enumerate(training.model):
            layer.ms = 0.95 if position // 4 == number % 4 else 1.0
        training.step()
    found = training.steady(0)
    assert (found.offloaded_bytes, found.waited_ms) == (steady.offloaded_bytes, 0)


@pytest.mark.parametrize("link_bytes_per_ms", [1500, 2000, 2500])
def test_time_that_may_be_added_is_that_of_usual_rounds(link_bytes_per_ms):
    goal = PlanGoal(max_overhead=0.15)
    steady = Training(goal=goal, link_bytes_per_ms=link_bytes_per_ms).steady()
    training = Training(goal=goal, link_bytes_per_ms=link_bytes_per_ms)
    for number in range(26):
        for layer in training.model:
            layer.ms = 1.0 if number % 3 else 0.9
        training.step()
    found, forecast = training.steady(0), training.offloader._tuner.forecast
    assert (found.peak_bytes, found.waited_ms) == (steady.peak_bytes, pytest.approx(steady.waited_ms))
    assert forecast.stalled_ms == pytest.approx(found.waited_ms, abs=0.2)  # foreseen over all known rounds


def test_moments_are_the_objects_of_the_last_round_and_no_others_are_kept():
    training = Training(goal=FREE, link_bytes_per_ms=5000)
    for _ in range(4):
        training.step()
    recorder = training.offloader._tuner._recorder
    before = {id(moment) for moment in recorder._moments}
    training.step()
    assert before == {id(moment) for moment in recorder._moments}
    del training.model[2:]
    for _ in range(2):
        training.step()
    assert len(recorder._moments) < len(before) / 2


PIPELINE = {"stages": 3, "micro_batches": 6, "layers": 6}


@pytest.mark.parametrize(("link_bytes_per_ms", "layers_freed"), [(1400, 6), (1000, 4), (600, 2)])
def test_a_link_that_cannot_carry_it_all_carries_what_is_away_longest(link_bytes_per_ms, layers_freed):
    """A micro-batch takes 18 ms of a stage and saves 24000 bytes: at 1333 a millisecond the way back is full."""
    found = Training(goal=FREE, link_bytes_per_ms=link_bytes_per_ms, **PIPELINE).steady()
    assert plain(**PIPELINE).peak_bytes - found.peak_bytes >= layers_freed * LAYER_BYTES
    assert (found.waited_ms, found.late_reloads) == (0, 0)


@pytest.mark.parametrize("link_bytes_per_ms", [20000, 5000])
def test_a_pipeline_stage_is_planned_over_all_its_micro_batches(link_bytes_per_ms):
    without = plain(**PIPELINE)
    found = Training(goal=FREE, link_bytes_per_ms=link_bytes_per_ms, **PIPELINE).steady()
    # Three micro-batches are in flight, of six layers each; two of them wait for their backward.
    assert without.peak_bytes - found.peak_bytes >= 8 * LAYER_BYTES
    assert (found.waited_ms, found.late_reloads) == (0, 0)
    assert torch.equal(found.gradient, without.gradient)
