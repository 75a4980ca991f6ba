import contextlib
import math
import statistics
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import changing_steps, deepseek, measure, megatron, modes, on_time, settings, tables
from ds_fgoffload.planning.planner import PlanGoal
from tests.helpers.simulated import Training


@pytest.fixture(params=sorted(settings.SELECTED))
def job(request):
    return on_time.build(on_time.parse(["--tiny", "--model", request.param]))


def gradients(job):
    return [p.grad.clone() for p in job.model.parameters()]


class TestTheDeepSeekStack:
    def test_grouped_experts_equal_experts_one_by_one(self):
        torch.manual_seed(0)
        shape = deepseek.TINY
        moe = deepseek.MoE(shape).double()
        for parameter in moe.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x = torch.randn(1, 40, shape.hidden, dtype=torch.double, requires_grad=True)
        routes = moe.router(x.flatten(0, -2))
        expert_of_copy = torch.searchsorted(routes.ends, routes.row.to(torch.int32), right=True).view(40, -1)

        expected = []
        for token in range(40):
            row = x[0, token]
            total = moe.shared_experts(row)
            for weight, expert in zip(routes.weights[token], expert_of_copy[token].tolist(), strict=True):
                inner = moe.experts.act(moe.experts.fc1.weight[expert] @ row)
                total = total + weight * (moe.experts.fc2.weight[expert] @ inner)
            expected.append(total)
        expected = torch.stack(expected).unsqueeze(0)
        got = moe(x)
        torch.testing.assert_close(got, expected)
        wanted = torch.autograd.grad(expected.square().sum(), [x, *moe.parameters()])
        found = torch.autograd.grad(got.square().sum(), [x, *moe.parameters()])
        assert all(gradient.abs().max() > 1e-3 for gradient in wanted)
        torch.testing.assert_close(found, wanted)

    def test_routers_read_only_when_asked(self):
        model = deepseek.DeepSeek(deepseek.TINY)
        tokens = torch.randint(0, 128, (1, 16))
        router = model.layers[0].mlp.router
        model(tokens)
        assert router.counts == []
        model.read_counts(reads=True)
        model(tokens)
        assert sum(router.counts) == 16 * deepseek.TINY.experts_per_token

    def test_what_the_selected_modules_save_is_what_the_docstring_says(self):
        job = on_time.build(on_time.parse(["--tiny"]))
        with modes.ours(job, section={"policy": "all"}) as run:
            run.step()
            units = run.attachment.stats().units
        by_hand = deepseek.saved_mib(deepseek.TINY, 64)
        for name in ("mlp.experts.fc1", "mlp.experts.act"):
            ends_bytes = 16 if name.endswith("fc1") else 0
            assert units[f"layers.0.{name}"].saved_bytes - ends_bytes == by_hand[name] * 2**20

    def test_the_table_of_the_docstring(self):
        whole = deepseek.saved_mib(deepseek.DeepSeekShape(), 4096)
        for name, mib in whole.items():
            line = next(line for line in deepseek.__doc__.splitlines() if line.startswith(f"``{name}``"))
            assert f" {mib:.0f} " in line


class TestModes:
    @pytest.mark.parametrize("name", [name for name, mode in settings.table().items() if not mode.needs_gpu])
    def test_losses_and_gradients_are_those_of_plain_training(self, job, name):
        loss, expected = job.step(), gradients(job)
        before = {module: (dict(vars(module)), len(module._forward_hooks)) for module in job.model.modules()}
        with settings.table()[name].open(job) as run:
            for _ in range(2):
                assert torch.equal(run.step(), loss)
        assert all(torch.equal(a, b) for a, b in zip(gradients(job), expected, strict=True))
        for module, (contents, hooks) in before.items():
            assert "forward" not in vars(module)
            assert len(module._forward_hooks) == hooks
            assert vars(module).keys() == contents.keys()

    def test_deepspeed_takes_the_input_of_every_layer(self, job, monkeypatch):
        managers = []

        class Watched(modes.CheckpointHiddenStatesOffload):
            def __init__(self):
                super().__init__()
                managers.append(self)

            def _should_skip(self, tensor):
                return False

        monkeypatch.setattr(modes, "CheckpointHiddenStatesOffload", Watched)
        loss, expected = job.step(), gradients(job)
        with modes.deepspeed_checkpoint_inputs(job) as run:
            assert torch.equal(run.step(), loss)
        assert managers[0].stats.marked_tensors == len(job.model.layers)
        assert managers[0].stats.restored_tensors + managers[0].stats.kept_last_tensors == len(job.model.layers)
        assert all(torch.equal(a, b) for a, b in zip(gradients(job), expected, strict=True))

    def test_every_section_of_ours_is_allowed(self, job):
        for name, section in settings.OURS.items():
            with modes.ours(job, section=section) as run:
                assert run.attachment.stats().units, name


class Events:
    """CUDA's streams and events as far as Megatron's and TRL's managers use them; nothing is asynchronous."""

    def record(self, stream=None):
        pass

    record_event = wait_event = wait_stream = record

    def synchronize(self):
        pass


def torch_with(**others):
    """All of torch for one module alone, some of it replaced; without a GPU nothing can be page-locked."""

    def unpinned(function):
        def call(*arguments, pin_memory=False, **options):
            return function(*arguments, **options)

        return call

    names = {name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")}
    return SimpleNamespace(
        **{**names, "empty": unpinned(torch.empty), "empty_like": unpinned(torch.empty_like), **others}
    )


@pytest.fixture
def megatron_on_cpu(monkeypatch):
    """Megatron's manager with its tensors on the CPU, and what it copies."""
    try:
        package = megatron.load()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    cuda = SimpleNamespace(
        Stream=Events,
        Event=lambda **_: Events(),
        stream=lambda _: contextlib.nullcontext(),
        current_stream=Events,
        is_available=lambda: False,
    )
    package.torch = torch_with(cuda=cuda)
    copied = Counter()
    handler = package.ChunkOffloadHandler
    offload = handler.offload

    def counting_offload(self, tensor, pin_memory=True, use_cpu_pool=True):
        copied["bytes"] += tensor.numel() * tensor.element_size()
        return offload(self, tensor, pin_memory, use_cpu_pool)

    monkeypatch.setattr(handler, "offload", counting_offload)
    monkeypatch.setattr(
        handler, "_can_manage_tensor_for_offload", staticmethod(lambda t: not isinstance(t, torch.nn.Parameter))
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(megatron, "load", lambda: package)
    return copied


@pytest.mark.parametrize("options", [{}, {"in_flight": 2}, {"fraction": 0.5}], ids=str)
def test_megatron_trains_the_same_and_copies_what_the_selected_modules_save(job, megatron_on_cpu, options):
    loss, expected = job.step(), gradients(job)
    with modes.ours(job, section={"policy": "all"}) as run:
        run.step()
        saved_bytes = run.attachment.stats().saved_bytes
    with megatron.megatron(job, **options) as run:
        for step in range(4):
            megatron_on_cpu.clear()
            assert torch.equal(run.step(), loss)
            assert all(torch.equal(a, b) for a, b in zip(gradients(job), expected, strict=True))
            if step == 0:
                # It learns, and copies all: no weights, but what a norm on the CPU saves twice it copies twice.
                assert saved_bytes <= megatron_on_cpu["bytes"] < 1.4 * saved_bytes
            elif options.get("fraction"):
                assert 0 < megatron_on_cpu["bytes"] < 0.8 * saved_bytes
            else:
                assert 0 < megatron_on_cpu["bytes"] < saved_bytes
    assert all(not hasattr(p, "_do_not_offload") for p in job.model.parameters())
    assert torch.equal(job.step(), loss)


@pytest.fixture
def trl_on_cpu(monkeypatch):
    """TRL's manager with its tensors on the CPU, and the bytes of each that it packs."""
    pytest.importorskip("trl")
    package = modes.trl_activation_offloading()
    streams = SimpleNamespace(Stream=Events, stream=lambda _: contextlib.nullcontext(), current_stream=Events)
    package.torch = torch_with(
        accelerator=SimpleNamespace(current_accelerator=lambda: torch.device("cpu")),
        get_device_module=lambda _: streams,
    )
    packed = []
    manager = package.OffloadActivations

    class Watched(manager):
        def __init__(self, **options):
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (packed.append(tensor.nbytes), pack(tensor))[1]

    monkeypatch.setattr(package, "OffloadActivations", Watched)
    monkeypatch.setattr(modes, "trl_activation_offloading", lambda: package)
    monkeypatch.setattr(changing_steps, "trl_activation_offloading", lambda: package)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return packed


@pytest.mark.parametrize("whole", [False, True])
def test_trl_trains_the_same_and_takes_the_selected_modules_or_all(job, trl_on_cpu, whole):
    loss, expected = job.step(), gradients(job)
    counts = []
    with modes.trl(job, whole=whole) as run:
        for _ in range(2):
            trl_on_cpu.clear()
            assert torch.equal(run.step(), loss)
            assert all(torch.equal(a, b) for a, b in zip(gradients(job), expected, strict=True))
            counts.append(len(trl_on_cpu))
    per_layer = counts[0] / len(job.model.layers)
    assert counts[0] == counts[1]
    assert per_layer > 30 if whole else 0 < per_layer < 30


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return tmp_path


class TestTheScript:
    def run(self, *arguments):
        return on_time.main(["--tiny", "--warmup", "1", "--repeats", "2", "--rounds", "2", "--pairs", "3", *arguments])

    def test_a_mode_that_fails_is_recorded_and_the_others_go_on(self, results, capsys):
        chosen = ("--modes", "ours e*", "ours b*", "recompute", "trl", "--setting", 'ours bad={"moduls": []}')
        figures = self.run("--reads", "also", *chosen)
        assert tables.load("on_time_deepseek")["failed"] == figures["failed"]
        figures = tables.load("on_time_deepseek")
        names = {"plain", "ours everything", "recompute"}
        assert figures["modes"].keys() == names | {f"{name}, reads" for name in names}
        assert figures["failed"].keys() == {"ours bad", "ours bad, reads"}
        assert "moduls" in figures["failed"]["ours bad"]
        assert figures["not_run"].keys() == {"trl", "trl, reads"}
        for mode in figures["modes"].values():
            assert len(mode["rounds"]) == 2
            assert mode["losses_equal"]
            assert mode["gradients_equal"]
            assert not [key for key in mode if "failed" in key]
        assert figures["modes"]["ours everything"]["per_step"]["offloaded_bytes"] > 0

        without = "\n".join(tables.on_time(figures))
        assert without.count("\n| ") == 5  # the head, three modes, one that failed
        assert "failed: OffloadConfigError" in without
        assert tables.more().count("a blocking read in every router") == 1

    def test_what_there_is_no_time_for_is_not_run(self, results):
        figures = self.run("--seconds", "0", "--modes", "recompute")
        assert figures["modes"] == {}
        assert figures["not_run"].keys() == {"plain", "recompute"}

    def test_many_steps_tell_the_peak_of_every_20(self, results):
        figures = self.run("--steps", "25", "--modes", "ours everything")
        row = figures["modes"]["ours everything"]
        assert row["steps"] == 25
        assert len(row["max_reserved_gib_per_20_steps"]) == 2
        assert row["counts"]["offloaded_bytes"] > 0
        assert "| 25 |" in "\n".join(tables.steps(figures))

    def test_the_plot_is_drawn(self, results):
        pytest.importorskip("matplotlib")
        from benchmarks import plot

        numbers = {"added_time": 0.3, "freed_reserved_gib": 2.0}
        figures = {"modes": dict.fromkeys(("plain", "ours everything", "recompute", "recompute, reads"), numbers)}
        assert [name for _, name, _, _ in plot.points(figures)] == ["ours everything", "recompute"]
        plot.draw(figures, results / "one.svg")
        plot.draw(figures, results / "two.svg")
        assert "ours everything" in (results / "one.svg").read_text()
        assert (results / "one.svg").read_bytes() == (results / "two.svg").read_bytes()


def test_equal_gradients_have_equal_sums_and_others_do_not():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).bfloat16()
    model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
    first = measure.gradient_sums(model)
    assert measure.gradient_sums(model) == first
    model.weight.grad.view(torch.int16)[3, 3] ^= 1
    assert measure.gradient_sums(model) != first


def test_pairs_tell_what_a_step_takes_more():
    row = measure.Pairs([103.0, 104.0, 300.0], [100.0, 102.0, 98.0]).summary()
    assert (row["added_ms"], row["added_time"]) == (3.0, 0.03)
    assert row["added_time_mean"] == pytest.approx((3 + 2 + 202) / 3 / 100)
    assert row["added_time_error"] == pytest.approx(statistics.stdev([3, 2, 202]) / 3**0.5 / 100)
    assert measure.Pairs([103.0], [100.0]).summary()["added_time_error"] == 0.0


def test_in_pairs_each_is_first_in_turn():
    order = []

    def step(name):
        order.append(name)
        return torch.zeros(())

    pairs = measure.time_pairs(lambda: step("own"), lambda: step("plain"), 4, math.inf)
    assert order == ["plain", "own", "own", "plain"] * 2
    assert len(pairs.own_ms) == len(pairs.plain_ms) == 4
    assert len(measure.time_pairs(lambda: step("own"), lambda: step("plain"), 4, 0.0).own_ms) == 1


class TestChangingSteps:
    def run(self, *arguments):
        return changing_steps.main(["--tiny", "--learn", "2", "--steps", "3", *arguments])

    def test_all_turns_run_and_losses_are_equal(self, results, capsys):
        self.run("--plan-file", "--setting", 'ours bad={"moduls": []}')
        figures = tables.load("changing_steps_qwen3")
        kinds = ("fixed", "uniform", "buckets")
        expected = {
            f"{kind}, {mode}"
            for kind in kinds
            for mode in ("plain", "plain, again", "ours", "ours, plan", "ours 1%", "ours 1%, plan", "checkpointing")
        }
        assert figures["turns"].keys() == expected
        assert figures["failed"].keys() == {
            *(f"{kind}, trl" for kind in kinds),
            *(f"{kind}, ours bad" for kind in kinds),
            *(f"{kind}, ours bad, plan" for kind in kinds),
            "uniform, trl, check",
            "uniform, ours bad, check",
        }
        assert "moduls" in figures["failed"]["fixed, ours bad"]
        assert figures["not_run"] == []
        for mode in ("plain", "ours", "ours 1%", "checkpointing"):
            check = figures["checks"][f"uniform, {mode}, check"]
            assert check["losses_equal"]
            assert check["gradient_sums_equal"]
            assert len(set(check["gradient_sums"])) == 5
            assert (check["offloaded_bytes"] > 0) == mode.startswith("ours")
        for kind in kinds:
            first, second = (figures["turns"][f"{kind}, {mode}"] for mode in ("plain", "ours"))
            assert first["steps"]["index"] == second["steps"]["index"] == [0, 1, 2, 3, 4]
            assert first["steps"]["loss"] == second["steps"]["loss"]
            assert (second["first"]["steps"], second["after"]["steps"]) == (2, 3)
            loaded = figures["turns"][f"{kind}, ours, plan"]["loaded"]
            assert loaded["first_runs_step"] == 4
            assert loaded["length"] == figures["lengths"][kind][3]
        text = "\n".join(tables.changing_steps(figures))
        assert text.count("failed: OffloadConfigError") == 7
        assert text.count("yes, yes") == 4
        assert "Qwen3** (2 layers" in tables.more()

    def test_experts_and_no_time(self, results, capsys):
        self.run("--model", "qwen3_moe", "--lengths", "fixed", "--modes", "ours", "--plan-file", "ours 1%")
        figures = tables.load("changing_steps_qwen3_moe")
        checks = [figures["checks"][f"fixed, {mode}, check"] for mode in ("plain", "ours")]
        assert checks[0]["gradient_sums"] == checks[1]["gradient_sums"]
        assert figures["turns"].keys() == {"fixed, plain", "fixed, ours", "fixed, plain, again"}
        assert figures["experts"] == "grouped_mm"
        assert "4 experts by `grouped_mm`" in "\n".join(tables.changing_steps(figures))

        nothing = self.run("--seconds", "0", "--modes", "ours", "--lengths", "buckets")
        assert nothing["turns"] == {}
        assert "buckets, plain" in nothing["not_run"]

    def test_a_mode_that_takes_long_has_fewer_steps_and_is_compared_with_as_many(self, results, capsys):
        figures = self.run("--longest", "0", "--lengths", "buckets", "--modes", "plain", "--no-check")
        assert figures["turns"].keys() == {"buckets, plain", "buckets, plain, again"}
        figures = self.run("--longest", "0", "--lengths", "buckets", "--modes", "checkpointing", "--no-check")
        assert figures["turns"].keys() == {"buckets, plain", "buckets, plain, again"}
        step = changing_steps.Step(3, 64, 8.0, 8.0, 0, 0, 0, 0, 1.0)
        other = changing_steps.Step(3, 64, 5.0, 5.0, 0, 0, 0, 0, 1.0)
        unpaired = changing_steps.Step(4, 64, 9.0, 9.0, 0, 0, 0, 0, 1.0)
        assert changing_steps.time_over([step], [other, unpaired]) == pytest.approx(0.6)
        assert changing_steps.time_over([unpaired], [other]) is None

    def test_trl_takes_what_layers_save(self, trl_on_cpu):
        arguments = changing_steps.parse(["--tiny"])
        training, other = changing_steps.Training(arguments), changing_steps.Training(arguments)
        with changing_steps.trl(training) as run:
            for length in (64, 40):
                trl_on_cpu.clear()
                assert torch.equal(run.step(length), other.step(length))
                assert len(trl_on_cpu) > 60

    def test_lengths_are_the_same_each_time_and_within_bounds(self):
        uniform, buckets, fixed = (
            changing_steps.lengths_of(kind, 90, 8192) for kind in ("uniform", "buckets", "fixed")
        )
        assert uniform == changing_steps.lengths_of("uniform", 120, 8192)[:90]
        assert min(uniform) >= 2048
        assert min(max(uniform[:30]), max(uniform[30:]), uniform[39], buckets[39]) > 8000
        assert set(buckets) == {2048, 4096, 8192}
        assert set(fixed) == {8192}

    def test_what_a_plan_foresaw_beside_what_came(self):
        training = Training(goal=PlanGoal())
        for _ in range(20):
            training.step()
        tuner = training.offloader._tuner
        expected = changing_steps.expected_of(tuner, tuner._classes[0].size)
        assert changing_steps.expected_of(tuner, 10_000) is None
        assert changing_steps.expected_of(None, 1) is None
        assert len(changing_steps.distinct(iter([None, expected, expected]))) == 1
        planned = changing_steps.planned_of(*expected)
        assert planned["is_last"]
        assert planned["freed_bytes"] > 0
        planned |= {"tokens": [100]}
        static = 1000

        def step(index, length, ms, peak, expected=None):
            share = length / 100
            counts = {
                "saved_bytes": planned["saved_bytes"] * share,
                "offloaded_bytes": planned["copied_bytes"] * share * 1.1,
                "stalled_ms": 0.0,
            }
            peak_allocated = int(static + (peak - static) * share)
            return changing_steps.Step(
                index, length, ms, ms, 0, peak_allocated, static, 0, 0.0, counts=counts, expected=expected
            )

        freed, peak = planned["freed_bytes"], planned["peak_bytes"]
        own = [
            step(0, 100, 99.0, 9 * peak, expected),
            step(5, 100, 102.0, peak, expected),
            step(6, 95, 98.0, peak, expected),
        ]
        plain = {5: step(5, 100, 100.0, peak + freed), 6: step(6, 95, 100.0, peak + freed)}
        found = changing_steps.against_plan(planned, [*own, step(7, 95, 50.0, 0)], plain, learn=2)
        assert found["steps"] == 2
        assert found["saved_bytes_error"] == pytest.approx(0)
        assert found["copied_bytes_error"] == pytest.approx(1 / 1.1 - 1)
        assert found["peak_bytes_error"] == pytest.approx(0, abs=1e-3)
        assert found["freed_bytes_error"] == pytest.approx(0, abs=1e-3)
        assert found["measured_added_time"] == pytest.approx(0)
        assert found["added_time_error"] == pytest.approx(-planned["stalled_ms"] / 102.6, rel=1e-2)
        assert changing_steps.against_plan(planned, own, plain, learn=9) is None
        assert changing_steps.against_plan({**planned, "is_last": False}, own, plain, learn=2) is None

    def test_plans_stand_in_the_file_and_the_table(self, results, monkeypatch, capsys):
        training = Training(goal=PlanGoal())
        for _ in range(20):
            training.step()
        (of_its_size,) = training.offloader._tuner._classes
        of_its_size.size, of_its_size.profile = 64, replace(of_its_size.profile, sizes=(64,))
        monkeypatch.setattr(
            changing_steps, "tuner_of", lambda run: training.offloader._tuner if run.attachment else None
        )
        self.run("--lengths", "fixed", "--modes", "ours", "--no-check")
        figures = tables.load("changing_steps_qwen3")
        (found,) = figures["turns"]["fixed, ours"]["predicted"]
        assert found["steps"] == 3
        assert found["measured_saved_bytes"] > 0
        assert figures["turns"]["fixed, ours"]["steps"]["follows_plan"] == [1] * 5
        assert "| fixed, ours | 64 | 3 | " in "\n".join(tables.changing_steps(figures))
