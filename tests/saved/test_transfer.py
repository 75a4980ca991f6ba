"""Every wait is needed, and together they are enough: random programs on streams that do their worst."""

import ast
import importlib.util
import inspect
from unittest import mock

import pytest

from ds_fgoffload.host_memory.pool import Lease
from ds_fgoffload.planning import planner, tuner
from ds_fgoffload.saved import transfer as transfer_module
from ds_fgoffload.saved.transfer import Parcel, ParcelState, Transfer
from tests.helpers.adversarial import run_seed

ENOUGH_SEEDS = 1500
"""A fault is found long before; only a wait that is not needed makes all of them run."""


@pytest.mark.parametrize(
    "first", [0, 50, 100, *(pytest.param(first, marks=pytest.mark.full) for first in range(150, 400, 50))]
)
def test_random_programs_give_the_same_numbers_and_no_access_is_out_of_order(first):
    problems = {seed: run_seed(seed).problems for seed in range(first, first + 50)}
    assert {seed: found for seed, found in problems.items() if found} == {}, (
        "python -m tests.helpers.adversarial --seed ..."
    )


def test_random_programs_do_all_that_there_is_to_do():
    stats = [s for seed in range(40) for s in run_seed(seed).stats]
    for count in (
        "offloaded_bytes",
        "reloaded_bytes",
        "kept_bytes",
        "held_bytes",
        "used_in_place_bytes",
        "late_reloads",
    ):
        assert sum(getattr(s, count) for s in stats) > 0, count


def test_plans_are_made_of_what_random_programs_repeat(monkeypatch):
    forecasts = []

    def plan_round(*arguments, **more):
        forecasts.append(planner.plan_round(*arguments, **more))
        return forecasts[-1]

    monkeypatch.setattr(tuner, "plan_round", plan_round)
    for seed in range(40):
        run_seed(seed)
    assert sum(bool(forecast.points.release) for forecast in forecasts) > 5
    assert sum(forecast.points.moved is not None and not forecast.points.moved for forecast in forecasts) > 0


def caught_by(transfer_class):
    """The seed, and the first thing that went wrong."""
    for seed in range(ENOUGH_SEEDS):
        problems = run_seed(seed, transfer_class).problems
        if problems:
            return seed, problems[0]
    return None


def waits():
    tree = ast.parse(inspect.getsource(transfer_module))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and ".wait(" in ast.unparse(node)]


def name_of(wait):
    source = ast.parse(inspect.getsource(transfer_module))
    functions = [f for f in ast.walk(source) if isinstance(f, ast.FunctionDef)]
    inside = next(f for f in functions if f.lineno <= wait.lineno <= f.end_lineno)
    return f"{inside.name}: {ast.unparse(wait)}"


class _Without(ast.NodeTransformer):
    def __init__(self, line):
        self.line = line

    def visit_Expr(self, node):
        return ast.Pass() if node.lineno == self.line else node


def transfer_without(wait):
    tree = _Without(wait.lineno).visit(ast.parse(inspect.getsource(transfer_module)))
    mutant = importlib.util.module_from_spec(transfer_module.__spec__)
    exec(compile(ast.fix_missing_locations(tree), "mutant", "exec"), mutant.__dict__)
    return mutant.Transfer


@pytest.mark.parametrize("wait", waits(), ids=name_of)
def test_no_wait_can_be_left_out(wait, record_property):
    found = caught_by(transfer_without(wait))
    record_property("found", found)
    assert found is not None, f"{ENOUGH_SEEDS} programs went well without {ast.unparse(wait)}"


class WithoutBeforeRelease(Transfer):
    def before_release(self, copied_out, stats):
        pass


class WithoutBeforeUse(Transfer):
    def before_use(self, copied_in, compute, stats):
        pass


class WithoutBeforeDrop(Transfer):
    def before_drop(self, copied_in, compute):
        pass


class KnowsOnlyTheStreamOfNow(Transfer):
    def compute(self):
        compute = super().compute()
        self._computes = {compute: None}
        return compute


@pytest.mark.parametrize("mutant", [WithoutBeforeRelease, WithoutBeforeUse, WithoutBeforeDrop, KnowsOnlyTheStreamOfNow])
def test_a_storage_may_not_skip_what_orders_its_end(mutant, record_property):
    found = caught_by(mutant)
    record_property("found", found)
    assert found is not None


def test_a_use_on_one_stream_is_none_on_another(record_property):
    end = Parcel.__del__

    def careless_end(parcel):
        if parcel._ready_on:
            parcel._ready_on = (parcel._compute,)
        end(parcel)

    with mock.patch.object(Parcel, "__del__", careless_end):
        found = caught_by(Transfer)
    record_property("found", found)
    assert found is not None


def test_a_block_may_not_go_back_without_its_last_uses(record_property):
    give_back = Lease.give_back
    with mock.patch.object(Lease, "give_back", lambda lease, *_: give_back(lease)):
        found = caught_by(Transfer)
    record_property("found", found)
    assert found is not None


def test_memory_that_is_being_copied_out_is_not_dropped_before_the_copy(record_property):
    end = Parcel.__del__

    def careless_end(parcel):
        if parcel.state is ParcelState.COPYING_OUT:
            with mock.patch.object(type(parcel._transfer), "before_end"):
                end(parcel)
        else:
            end(parcel)

    with mock.patch.object(Parcel, "__del__", careless_end):
        found = caught_by(Transfer)
    record_property("found", found)
    assert found is not None
