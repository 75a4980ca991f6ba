import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from benchmarks import deepseek, megatron, modes, on_time, settings


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


@pytest.fixture
def megatron_on_cpu(monkeypatch):
    """Megatron's manager with its tensors on the CPU, and what it copies."""
    try:
        package = megatron.load()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    names = {name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")}
    cuda = SimpleNamespace(
        Stream=Events,
        Event=lambda **_: Events(),
        stream=lambda _: contextlib.nullcontext(),
        current_stream=Events,
        is_available=lambda: False,
    )

    def empty(*size, pin_memory=False, **options):
        return torch.empty(*size, **options)

    package.torch = SimpleNamespace(**{**names, "cuda": cuda, "empty": empty})
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
