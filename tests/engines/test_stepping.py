"""Ways of stepping that an engine's own counters do not tell: the same bits as without offloading, nothing left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ds_fgoffload
from ds_fgoffload.api import initialize_with
from ds_fgoffload.runtime import offloader
from tests.helpers.distributed import one_rank

ROWS, WIDTH, BLOCKS, STEPS = 4, 8, 3, 4
LARGEST_BYTES = ROWS * 4 * WIDTH * 4
SECTION = {"modules": ["blocks.*"], "min_tensor_bytes": 0, "prefetch_window_bytes": 2 * LARGEST_BYTES}
"""The window is too small for a wrong guess of what is needed next: then reloads are late."""
BLOCK_BYTES = ROWS * (1 + 4 + 4) * WIDTH * 4
"""The input of a block, and those of GELU and of its last layer."""
MICRO_BATCH_BYTES = BLOCKS * BLOCK_BYTES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x * 1.5)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(offloader, "ALONE_BYTES", 0)
    yield
    assert ds_fgoffload.host_pool().stats().leased_bytes == 0


def make_engine(stage: int, *, offloads: bool, seed: int = 0, accumulation: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    net = Net()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **({"fine_grained_offload": SECTION} if offloads else {}),
        **changes,
    }
    return ds_fgoffload.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(engine: Any, number: int) -> Tensor:
    return engine(batch(number)).square().mean()


class Moved:
    """What an engine's attachment has counted in each step."""

    def __init__(self, engine: Any, *, offloads: bool) -> None:
        self._offload = ds_fgoffload.get(engine)
        assert (self._offload is not None) == offloads
        self._bytes = self._late = 0

    def check(self, micro_batches: int, *, is_first: bool) -> None:
        if self._offload is None:
            return
        stats = self._offload.stats()
        assert stats.live_host_bytes == 0
        assert stats.offloaded_bytes - self._bytes == micro_batches * MICRO_BATCH_BYTES
        assert is_first or stats.late_reloads == self._late
        assert stats.held_bytes == 0
        self._bytes, self._late = stats.offloaded_bytes, stats.late_reloads


Step = Callable[..., tuple[int, list[Tensor]]]
"""Takes engines and the number of the step; returns how many micro-batches each engine has run, and losses."""


def train(step: Step, stage: int, *, offloads: bool, engines: int = 1, **config: Any) -> list[Tensor]:
    made: list[Tensor] = []
    used = [make_engine(stage, offloads=offloads, seed=seed, **config) for seed in range(engines)]
    moved = [Moved(engine, offloads=offloads) for engine in used]
    for number in range(STEPS):
        micro_batches, losses = step(*used, number)
        made += [loss.detach().clone() for loss in losses]
        del losses
        for counts in moved:
            counts.check(micro_batches, is_first=number == 0)
    for engine in used:
        with torch.no_grad():
            made.append(loss_of(engine, 99).clone())  # of the trained parameters
        engine.destroy()
    return made


def compare(step: Step, stage: int, **config: Any) -> None:
    found = train(step, stage, offloads=True, **config)
    expected = train(step, stage, offloads=False, **config)
    assert len(found) == len(expected) > STEPS
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[0], found[-1])


STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@STAGES
def test_gradient_accumulation(stage: int) -> None:
    def step(engine: Any, number: int) -> tuple[int, list[Tensor]]:
        losses = []
        for i in range(3):
            loss = loss_of(engine, 10 * number + i)
            engine.backward(loss)
            engine.step()
            losses.append(loss)
        return 3, losses

    compare(step, stage, accumulation=3)


@STAGES
def test_boundaries_set_by_hand_as_accelerate_does(stage: int) -> None:
    def step(engine: Any, number: int) -> tuple[int, list[Tensor]]:
        losses = []
        for i in range(2):
            is_last = i == 1
            loss = loss_of(engine, 10 * number + i)
            engine.set_gradient_accumulation_boundary(is_boundary=is_last)
            engine.backward(loss)
            if is_last:
                engine.step()
            losses.append(loss)
        return 2, losses

    compare(step, stage, accumulation=2)


@STAGES
def test_the_engine_wrapper_of_accelerate(stage: int) -> None:
    reason = "accelerate is not installed: test_boundaries_set_by_hand_as_accelerate_does stands for it"
    wrapper = pytest.importorskip("accelerate.utils.deepspeed", reason=reason).DeepSpeedEngineWrapper

    def step(engine: Any, number: int) -> tuple[int, list[Tensor]]:
        losses = []
        for i in range(2):
            loss = loss_of(engine, 10 * number + i)
            wrapper(engine).backward(loss, sync_gradients=i == 1)
            losses.append(loss)
        return 2, losses

    compare(step, stage, accumulation=2)


@pytest.mark.parametrize("stage", [1, 2])
def test_training_with_accelerate(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: no training with it to try")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(deepspeed, "initialize", partial(initialize_with, deepspeed.initialize))  # as ds_fgoffload.run

    def train_with_accelerate(section: dict[str, Any]) -> list[Tensor]:
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            **section,
        }
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()  # of another test in this process that had no engine
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
        accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        net = Net()
        data = DataLoader([row for number in range(2 * STEPS) for row in batch(number)], batch_size=ROWS)
        engine, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01), data)
        losses, moved = [], Moved(engine, offloads=bool(section))
        for number, rows in enumerate(loader):
            with accelerator.accumulate(engine):
                loss = engine(rows).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach().clone())
                del loss
            moved.check(1, is_first=number == 0)
        engine.destroy()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        return losses

    found = train_with_accelerate({"fine_grained_offload": SECTION})
    expected = train_with_accelerate({})
    assert len(found) == 2 * STEPS
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[0], found[-1])


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync(stage: int) -> None:
    def step(engine: Any, number: int) -> tuple[int, list[Tensor]]:
        losses = [loss_of(engine, 10 * number)]
        with engine.no_sync():
            engine.backward(losses[0])
            losses.append(loss_of(engine, 10 * number + 1))
            engine.backward(losses[1])
        losses.append(loss_of(engine, 10 * number + 2))
        engine.backward(losses[2])
        engine.step()
        return 3, losses

    compare(step, stage)


@STAGES
def test_accumulation_that_the_engine_does_not_manage(stage: int) -> None:
    """Any number of micro-batches in a step; here another one in each."""

    def step(engine: Any, number: int) -> tuple[int, list[Tensor]]:
        losses = []
        for i in range(1 + number % 2):
            losses.append(loss_of(engine, 10 * number + i))
            engine.backward(losses[i])
        engine.step()
        return 1 + number % 2, losses

    probe = make_engine(1, offloads=False)
    is_known = hasattr(probe, "managed_gradient_accumulation")
    probe.destroy()
    if not is_known:
        pytest.skip("this DeepSpeed has no managed_gradient_accumulation")
    compare(step, stage, managed_gradient_accumulation=False)


@STAGES
def test_an_actor_and_a_critic(stage: int) -> None:
    """The forward of one lies between forward and backward of the other."""

    def step(actor: Any, critic: Any, number: int) -> tuple[int, list[Tensor]]:
        acting = loss_of(actor, 10 * number)
        judging = loss_of(critic, 10 * number + 1)
        actor.backward(acting)
        actor.step()
        critic.backward(judging)
        critic.step()
        return 1, [acting, judging]

    compare(step, stage, engines=2)


@STAGES
def test_one_backward_of_two_forwards(stage: int) -> None:
    """As in contrastive learning."""

    def step(engine: Any, number: int) -> tuple[int, list[Tensor]]:
        loss = loss_of(engine, 10 * number) + 2 * loss_of(engine, 10 * number + 1)
        engine.backward(loss)
        engine.step()
        return 2, [loss]

    compare(step, stage)


@STAGES
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first saved first", "last saved first"])
def test_two_backwards_after_two_forwards(order: tuple[int, int], stage: int) -> None:
    def step(engine: Any, number: int) -> tuple[int, list[Tensor]]:
        losses = [loss_of(engine, 10 * number + i) for i in range(2)]
        for i in order:
            engine.backward(losses[i])
            engine.step()
        return 2, losses

    compare(step, stage, accumulation=2)


@STAGES
@pytest.mark.parametrize("kept", [False, True], ids=["dropped at once", "kept until the step's end"])
def test_a_forward_without_backward(kept: bool, stage: int) -> None:
    def step(engine: Any, number: int) -> tuple[int, list[Tensor]]:
        unused = [loss_of(engine, 10 * number)]
        if not kept:
            unused.clear()
        loss = loss_of(engine, 10 * number + 1)
        engine.backward(loss)
        engine.step()
        return 2, [loss, *unused]

    compare(step, stage)


@STAGES
def test_generation_and_evaluation_in_between(stage: int) -> None:
    def step(engine: Any, number: int) -> tuple[int, list[Tensor]]:
        def look() -> list[Tensor]:
            engine.eval()
            x, made = batch(10 * number + 5), []
            with torch.no_grad():
                for _ in range(3):
                    x = engine(x)
                    made.append(x)
            engine.train()
            return made

        before = look()
        loss = loss_of(engine, 10 * number)
        between = look()
        engine.backward(loss)
        engine.step()
        return 1, [*before, loss, *between]

    compare(step, stage)
