"""Training under ZeRO 0-3 on two ranks: losses, gradients, parameters are the same bits with and without offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_fgoffload
from ds_fgoffload.runtime import offloader
from ds_fgoffload.runtime.hooks import ModuleHook
from ds_fgoffload.runtime.offloader import ALONE_BYTES
from tests.helpers.distributed import Outcome, run_cases

WIDTH, LENGTH, SEQUENCES, VOCABULARY, LAYERS = 16, 6, 2, 11, 2
TOKENS = SEQUENCES * LENGTH
FIRST_FROZEN = ("embed", "norm", "layers.0", "fc1.bias")
"""The first layer needs no gradient at all."""
LAST_FROZEN = ("layers.1", "head")
"""The last layer has no gradients of parameters, but hands a gradient on."""
UNITS = [f"layers.{i}.{part}" for i in range(LAYERS) for part in ("attn", "mlp")]


class Attention(nn.Module):
    """Saves its input, one storage under q, k and v, the softmax, and the input of ``out``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, dim=-1) @ v)


class Mlp(nn.Module):
    """Saves the inputs of ``fc1``, of GELU and of ``fc2``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc1(x))
        if self.fails:
            raise Fault
        return self.fc2(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Fault(Exception):
    """Raised inside a step on purpose, on every rank."""


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Tensor:
        raise Fault


class Model(nn.Module):
    """Called with targets it returns the loss, without them the logits."""

    def __init__(self, *, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed
        self.fails_in_backward = False
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if i == LAYERS - 1 and self.fails_in_backward:
                x = _FailInBackward.apply(x)
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        logits = self.head(x).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def fail_in(self, where: str | None) -> None:
        """From now on a step fails in the last unit's forward, or in backward behind the last layer, or nowhere."""
        self.layers[-1].mlp.fails = where == "forward"
        self.fails_in_backward = where == "backward"


@dataclass(frozen=True)
class Case:
    """``stage`` None is a plain module, trained without an engine."""

    stage: int | None
    dtype: torch.dtype = torch.float32
    accumulation: int = 1
    steps: int = 2
    zero: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)
    packed: bool = True  # small storages travel together
    autocast: bool = False
    frozen: tuple[str, ...] = ()
    tied: bool = False
    checkpointed: bool = False
    direct_backward: bool = False
    fails_in: str | None = None
    between_steps: bool = False

    @property
    def name(self) -> str:
        words = ["plain" if self.stage is None else f"zero{self.stage}", str(self.dtype).removeprefix("torch.")]
        for key in list(self.__dataclass_fields__)[2:]:
            value = getattr(self, key)
            if isinstance(value, dict):
                words += [f"{inner}={value[inner]}" for inner in value]
            elif isinstance(value, tuple):
                words += [f"{key}={'+'.join(value)}"] if value else []
            elif value != getattr(Case(0), key):
                words.append(key if value is True else f"{key}={value}")
        return "-".join(words)

    def section_of_config(self) -> dict[str, Any]:
        return {"modules": ["layers.*.attn", "layers.*.mlp"], "min_tensor_bytes": 0, **self.section}

    def micro_batch_bytes(self) -> int:
        """What the units save in one micro-batch, counted by hand; parameters are not in it."""
        size = 2 if self.autocast else self.dtype.itemsize
        mlp = TOKENS * (1 + 4 + 4) * WIDTH * size
        attn = TOKENS * ((1 + 3 + 1) * WIDTH + LENGTH) * size
        if self.autocast and self.stage == 3:  # ZeRO-3's linear saves what it was given, and casts inside
            mlp, attn = mlp + TOKENS * WIDTH * 2, attn + TOKENS * WIDTH * 2
        layers = (LAYERS - (self.frozen == FIRST_FROZEN)) * (attn + mlp)
        if self.frozen == LAST_FROZEN and self.stage != 3:  # no inputs of frozen layers; but ZeRO-3's own saves them
            layers -= TOKENS * (1 + 1 + 1 + 4) * WIDTH * size
        return layers


def micro_batch(index: int) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * rank + index)
    tokens, targets = torch.randint(VOCABULARY, (2, SEQUENCES, LENGTH), generator=generator)
    return tokens, targets


def make_model(case: Case, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model(tied=case.tied, checkpointed=case.checkpointed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
    return model


def make_engine(case: Case, model: Model, *, offloads: bool) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": case.stage, **case.zero},
        "bf16": {"enabled": case.dtype is torch.bfloat16},
    }
    if case.autocast:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if offloads:
        config["fine_grained_offload"] = case.section_of_config()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ds_fgoffload.initialize(model=model, model_parameters=trained, config=config)[0]


class EngineTrainer:
    def __init__(self, case: Case, *, offloads: bool, seed: int = 0) -> None:
        self.model = make_model(case, seed)
        self.engine = make_engine(case, self.model, offloads=offloads)
        self.offload = ds_fgoffload.get(self.engine)
        self._direct = case.direct_backward
        self.call = self.engine
        self.step = self.engine.step

    def backward(self, loss: Tensor) -> None:
        if self._direct:
            loss.backward()
        else:
            self.engine.backward(loss)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                gradient = safe_get_full_grad(parameter)
                assert gradient is not None, f"{name} has no gradient"
                yield name, gradient.detach().clone()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            for name, parameter in self.model.named_parameters():
                yield name, parameter.detach().clone()

    def close(self) -> None:
        self.engine.destroy()


class PlainTrainer:
    def __init__(self, case: Case, *, offloads: bool) -> None:
        self.model = make_model(case).to(case.dtype)
        self.offload = ds_fgoffload.attach(self.model, case.section_of_config()) if offloads else None
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self._accumulation = case.accumulation
        self._micro_batches = 0
        self.call = self.model

    def backward(self, loss: Tensor) -> None:
        (loss / self._accumulation).backward()
        self._micro_batches += 1

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, f"{name} has no gradient"
                yield name, parameter.grad.clone()

    def step(self) -> None:
        if self._micro_batches % self._accumulation == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().clone()

    def close(self) -> None:
        if self.offload is not None:
            self.offload.detach()


Trainer = EngineTrainer | PlainTrainer
History = dict[str, Tensor]


def make_trainer(case: Case, *, offloads: bool) -> Trainer:
    return (PlainTrainer if case.stage is None else EngineTrainer)(case, offloads=offloads)


def hooks_of_ours(model: nn.Module) -> int:
    return sum(
        isinstance(hook, ModuleHook)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
    )


def train(case: Case, *, offloads: bool) -> History:
    """Losses, gradients before each step, and the parameters at the end; counts are checked on the way."""
    trainer = make_trainer(case, offloads=offloads)
    assert (trainer.offload is not None) == offloads
    history: History = {}
    number = 0
    for step in range(case.steps):
        if case.fails_in is not None and step == 1:
            fail_once(trainer, case.fails_in, number)
        before = None if trainer.offload is None else trainer.offload.stats()
        for i in range(case.accumulation):
            tokens, targets = micro_batch(number)
            number += 1
            loss = trainer.call(tokens, targets)
            history[f"loss {step}.{i}"] = loss.detach().clone()
            trainer.backward(loss)
            if i == case.accumulation - 1:
                history |= {f"gradient {step} {name}": value for name, value in trainer.gradients()}
            del loss
            trainer.step()
        if before is not None:
            check_step(case, trainer.offload, before)
        if case.between_steps:
            history |= evaluate(trainer, step)
    history |= {f"parameter {name}": value for name, value in trainer.parameters()}
    close_and_check(trainer)
    return history


def fail_once(trainer: Trainer, where: str, number: int) -> None:
    trainer.model.fail_in(where)
    with suppress(Fault):
        trainer.backward(trainer.call(*micro_batch(number + 77)))
        raise AssertionError("the step did not fail")
    trainer.model.fail_in(None)
    for parameter in trainer.model.parameters():
        parameter.grad = None
    if trainer.offload is not None:
        assert trainer.offload.stats().live_host_bytes == 0
        assert ds_fgoffload.host_pool().stats().leased_bytes == 0
        assert not saving_is_hooked()


def saving_is_hooked() -> bool:
    """Whether saved-tensor hooks are active here, outside any unit."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def evaluate(trainer: Trainer, step: int) -> History:
    """An evaluation, and tokens generated one by one; nothing of it is counted."""
    before = trainer.offload and trainer.offload.stats()
    trainer.call.eval()
    tokens, targets = micro_batch(500 + step)
    made: History = {}
    with torch.no_grad():
        made[f"evaluation {step}"] = trainer.call(tokens, targets)
        for _ in range(2):
            tokens = torch.cat((tokens, trainer.call(tokens)[:, -1:].argmax(-1)), dim=1)
    trainer.call.train()
    assert (trainer.offload and trainer.offload.stats()) == before
    return made | {f"generated {step}": tokens}


def check_step(case: Case, offload: Any, before: Any) -> None:
    """One step copied out just what was counted by hand, copied it back, and left nothing on the host."""
    stats = offload.stats()
    moved = stats.offloaded_bytes - before.offloaded_bytes
    assert moved == case.accumulation * case.micro_batch_bytes()
    in_place = stats.used_in_place_bytes - before.used_in_place_bytes
    assert stats.reloaded_bytes - before.reloaded_bytes + in_place == moved
    assert stats.reloaded_bytes > before.reloaded_bytes
    assert (in_place > 0) == ("release_window_bytes" in case.section)
    assert (stats.held_bytes, stats.kept_bytes) == (0, 0)
    assert set(stats.skipped) == {"parameter"}
    assert stats.skipped["parameter"] > before.skipped["parameter"]
    assert stats.live_host_bytes == 0
    assert ds_fgoffload.host_pool().stats().leased_bytes == 0
    assert list(stats.units) == UNITS


def close_and_check(trainer: Trainer) -> None:
    """The end of an engine is the end of its offloading."""
    offloads = trainer.offload is not None
    assert (hooks_of_ours(trainer.model) > 0) == offloads
    assert (ds_fgoffload.host_pool().stats().pinned_bytes > 0) == offloads
    trainer.close()
    assert hooks_of_ours(trainer.model) == 0
    assert ds_fgoffload.get(trainer.call) is None
    assert ds_fgoffload.host_pool().stats().pinned_bytes == 0


def differences(expected: History, found: History) -> list[str]:
    assert expected.keys() == found.keys()
    return [key for key, value in expected.items() if not torch.equal(value, found[key])]


def compare(case: Case) -> None:
    offloader.ALONE_BYTES = ALONE_BYTES if case.packed else 0
    expected = train(case, offloads=False)
    found = train(case, offloads=True)
    assert differences(expected, found) == []
    assert all(torch.isfinite(value).all() for value in found.values())
    assert any(value.any() for key, value in found.items() if key.startswith("gradient"))


def two_engines_in_turn(stage: int) -> None:
    """An actor and a critic, whose forwards and backwards are interleaved and who share the pool."""

    def run(*, offloads: bool) -> History:
        case = Case(stage)
        actor, critic = (EngineTrainer(case, offloads=offloads, seed=seed) for seed in (1, 2))
        history: History = {}
        for step in range(2):
            tokens, targets = micro_batch(step)
            actor_loss = actor.call(tokens, targets)
            critic_loss = critic.call(targets, tokens)
            history |= {f"loss {step} actor": actor_loss.detach(), f"loss {step} critic": critic_loss.detach()}
            leased_bytes = ds_fgoffload.host_pool().stats().leased_bytes
            assert leased_bytes >= 2 * case.micro_batch_bytes() if offloads else leased_bytes == 0
            for name, trainer, loss in (("actor", actor, actor_loss), ("critic", critic, critic_loss)):
                trainer.backward(loss)
                history |= {f"gradient {step} {name} {p}": value for p, value in trainer.gradients()}
                trainer.step()
            del actor_loss, critic_loss, loss
            for offload in (actor.offload, critic.offload):
                if offload is not None:
                    stats = offload.stats()
                    assert stats.offloaded_bytes == stats.reloaded_bytes == (step + 1) * case.micro_batch_bytes()
                    assert stats.live_host_bytes == 0
            assert ds_fgoffload.host_pool().stats().leased_bytes == 0
        actor.close()
        assert (ds_fgoffload.host_pool().stats().pinned_bytes > 0) == offloads  # the critic still uses the pool
        history |= {f"parameter critic {name}": value for name, value in critic.parameters()}
        critic.close()
        assert ds_fgoffload.host_pool().stats().pinned_bytes == 0
        return history

    assert differences(run(offloads=False), run(offloads=True)) == []


MATRIX = [
    Case(stage, dtype, accumulation, steps=3)
    for stage in (None, 0, 1, 2, 3)
    for dtype in (torch.float32, torch.bfloat16)
    for accumulation in (1, 3)
]
WINDOWS = [
    Case(stage, packed=packed, section={"release_window_bytes": 8192, "prefetch_window_bytes": window})
    for stage in (None, 3)
    for window in (0, 8192, 1 << 20)
    for packed in (True, False)
]
VARIANTS = [
    # ZeRO-3 is slow, so that some of its cases try two things at once.
    Case(3, torch.bfloat16, steps=3, zero={"stage3_param_persistence_threshold": 0}),
    Case(3, direct_backward=True, zero={"memory_efficient_linear": False}),
    Case(3, tied=True, packed=False),
    Case(3, checkpointed=True, between_steps=True),
    Case(3, autocast=True),
    Case(3, fails_in="forward"),
    *(Case(stage, frozen=frozen) for frozen in (FIRST_FROZEN, LAST_FROZEN) for stage in (2, 3)),
    Case(1, autocast=True),
    *(Case(stage, tied=True) for stage in (None, 1)),
    *(Case(stage, checkpointed=True) for stage in (None, 1, 2)),
    *(Case(stage, direct_backward=True) for stage in (1, 2)),
    *(Case(stage, between_steps=True) for stage in (None, 0, 1, 2)),
    *(Case(stage, fails_in="forward") for stage in (None, 1, 2)),
    # ZeRO 2 and 3 cannot go on if some gradients were reduced before the failure, with offloading or without.
    *(Case(stage, fails_in="backward", frozen=LAST_FROZEN) for stage in (None, 0, 1, 2, 3)),
    *(Case(stage, packed=False) for stage in (None, 2)),
]
ZERO3_IN_FULL = [MATRIX[-4], *MATRIX[-2:], *WINDOWS[-6::4], WINDOWS[-3]]
"""What other cases show in parts: a type and a number of micro-batches, a window and a packing."""


def jobs(cases: Iterable[Case]) -> dict[str, tuple[Any, ...]]:
    """ZeRO-3 replaces torch.nn.functional.linear for the rest of its process, so it comes last."""
    return {case.name: (compare, case) for case in sorted(cases, key=lambda case: case.stage or 0)}


JOBS = jobs(case for case in (*MATRIX, *WINDOWS, *VARIANTS) if case not in ZERO3_IN_FULL)
JOBS |= {f"two engines, zero{stage}": (two_engines_in_turn, stage) for stage in (1, 3)}
FULL_JOBS = jobs(ZERO3_IN_FULL)


def run_job(function: Callable[..., None], argument: Any) -> None:
    function(argument)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """All cases share their processes. (Under xdist, --dist loadfile keeps each worker from running all of them.)"""
    return run_cases(run_job, JOBS)


@pytest.fixture(scope="module")
def full_outcomes() -> dict[str, Outcome]:
    return run_cases(run_job, FULL_JOBS)


@pytest.mark.ranks
@pytest.mark.parametrize("name", JOBS)
def test_same_bits_on_two_ranks(name: str, outcomes: dict[str, Outcome]) -> None:
    outcomes[name].check()


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("name", FULL_JOBS)
def test_same_bits_in_every_cell(name: str, full_outcomes: dict[str, Outcome]) -> None:
    full_outcomes[name].check()
