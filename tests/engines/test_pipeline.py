"""DeepSpeed's pipeline engines on several ranks: the same bits with and without offloading, and no late reloads."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.utils import logger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_fgoffload
from ds_fgoffload import OffloadConfigError
from ds_fgoffload.runtime import offloader
from ds_fgoffload.stats import OffloadStats
from tests.helpers.distributed import Outcome, run_cases

WIDTH, SEQUENCES, LENGTH, VOCABULARY = 8, 2, 3, 11
EACH_LAYER = ["[0-9]"]
Stream = Tensor | tuple[Tensor, Tensor]
"""What a layer takes and returns: a tensor, or a tuple of two."""
History = dict[str, Tensor]


class Layer(nn.Module):
    """Saves its input, mean and deviation of the norm, the inputs of ``fc1``, of GELU and of ``fc2``.

    Given two tensors, it saves the second and a gate as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, stream: Stream) -> Stream:
        x = stream if isinstance(stream, Tensor) else stream[0]
        y = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        return y if isinstance(stream, Tensor) else (y, stream[1] * torch.sigmoid(y))


class Loss(nn.Module):
    """Saves the logarithms of the softmax, which nothing else holds."""

    def forward(self, stream: Stream, labels: Tensor) -> Tensor:
        return loss_of(stream, labels)


def loss_of(stream: Stream, labels: Tensor) -> Tensor:
    logits = stream if isinstance(stream, Tensor) else stream[0] + stream[1]
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def logits_of(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)


CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non_reentrant": partial(checkpoint, use_reentrant=False),
}


@dataclass(frozen=True)
class Case:
    """A few steps of training. ``micro_batches`` and ``length`` may be given per step."""

    engine: str
    stages: int
    micro_batches: int | tuple[int, ...]
    outputs: str = "tensor"
    checkpoint: str = "none"
    dtype: torch.dtype = torch.float32
    zero: int = 0
    steps: int = 2
    length: int | tuple[int, ...] = LENGTH
    modules: list[str] = field(default_factory=lambda: EACH_LAYER)
    section: dict[str, Any] = field(default_factory=dict)
    packed: bool = False  # small storages travel together
    tied: bool = False
    loss_is_module: bool = False
    numbers_per_token: int | None = None
    """What a layer saves, where that is not plain."""
    settles_in: int = 1
    """After so many steps that are alike no reload is late."""

    @property
    def name(self) -> str:
        words = [self.engine, f"{self.stages} stages", f"{self.micro_batches} micro-batches"]
        words += [self.outputs, self.checkpoint]
        for key in list(self.__dataclass_fields__)[5:]:
            value = getattr(self, key)
            if value != getattr(PLAIN, key):
                words.append(key if value is True else f"{key}={value}")
        return ", ".join(words)

    @property
    def layers(self) -> int:
        """DualPipeV has two parts on each stage."""
        return 2 * self.stages

    def micro_batches_in(self, step: int) -> int:
        return self.micro_batches if isinstance(self.micro_batches, int) else self.micro_batches[step]

    def length_in(self, step: int) -> int:
        return self.length if isinstance(self.length, int) else self.length[step]

    def has_settled(self, step: int) -> bool:
        before = range(max(0, step - self.settles_in), step)
        shapes = {(self.micro_batches_in(i), self.length_in(i)) for i in (*before, step)}
        return len(before) == self.settles_in and len(shapes) == 1

    def batch(self, step: int) -> Iterator[tuple[Stream, Tensor]]:
        shape = (SEQUENCES, self.length_in(step))
        for i in range(self.micro_batches_in(step)):
            generator = torch.Generator().manual_seed(1000 * step + i)
            labels = torch.randint(WIDTH, shape, generator=generator)
            if self.tied:
                yield torch.randint(VOCABULARY, shape, generator=generator), labels
                continue
            x, memory = (torch.randn(*shape, WIDTH, generator=generator).to(self.dtype) for _ in range(2))
            yield (x if self.outputs == "tensor" else (x, memory)), labels

    def saved_bytes(self, step: int) -> int | None:
        """What the units of this rank save in one step, counted by hand; None where that is not plain."""
        around = self.modules == ["*"]
        if self.checkpoint == "deepspeed reentrant" or (self.checkpoint == "deepspeed non_reentrant" and around):
            return 0  # the inputs lie where no hook sees them, and units inside a reentrant checkpoint save nothing
        if self.numbers_per_token is not None:
            return self._bytes_of(step, self.numbers_per_token)
        if self.tied or self.dtype is not torch.float32 or not (around or self.modules == EACH_LAYER):
            return None
        tensors = 1 if self.outputs == "tensor" else 2
        numbers = tensors * WIDTH
        if not around or self.checkpoint == "none":
            numbers = (1 + 1 + 2 + 2) * WIDTH + 2 + (tensors - 1) * 2 * WIDTH
        return self._bytes_of(step, numbers)

    def _bytes_of(self, step: int, numbers: int) -> int:
        layers_here = self.layers // self.stages
        return self.micro_batches_in(step) * layers_here * SEQUENCES * self.length_in(step) * numbers * 4


PLAIN = Case("1F1B", 2, 2)


def make_module(case: Case) -> PipelineModule:
    torch.manual_seed(0)
    layers: list[LayerSpec] = [LayerSpec(Layer) for _ in range(case.layers)]
    if case.tied:
        tied = partial(TiedLayerSpec, "embed", nn.Embedding, VOCABULARY, WIDTH)
        layers = [tied(), *layers[2:], tied(forward_fn=logits_of)]
    options: dict[str, Any] = {}
    if case.checkpoint in CHECKPOINTS:
        options["activation_checkpoint_func"] = CHECKPOINTS[case.checkpoint]
    kind = DualPipeVModule if case.engine == "DualPipeV" else PipelineModule
    return kind(
        layers=layers,
        num_stages=case.stages,
        loss_fn=Loss() if case.loss_is_module else loss_of,
        partition_method="uniform",
        activation_checkpoint_interval=0 if case.checkpoint == "none" else 1,
        **options,
    )


def make_engine(case: Case, *, offloads: bool) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": case.micro_batches_in(0),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": case.zero},
        "bf16": {"enabled": case.dtype is torch.bfloat16},
    }
    if case.checkpoint == "deepspeed non_reentrant":
        config["pipeline"] = {"use_reentrant": False}
    if offloads:
        config["fine_grained_offload"] = {"modules": case.modules, "min_tensor_bytes": 0, **case.section}
    module = make_module(case)
    return ds_fgoffload.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def record_gradients(engine: Any, history: History) -> None:
    """Every gradient of every parameter, of each micro-batch and stage output by itself, as backward makes it."""

    def record(name: str, gradient: Tensor) -> None:
        history[f"gradient {len(history)} {name}"] = gradient.clone()

    for name, parameter in engine.module.named_parameters():
        parameter.register_hook(partial(record, name))


@dataclass(frozen=True)
class Observed:
    """What was seen of the offloading in one step. Judged after training: a rank that stops fails its peers."""

    before: OffloadStats
    after: OffloadStats
    after_evaluation: OffloadStats
    leased_bytes: int
    left_in_engine: set[str]


def train(case: Case, *, offloads: bool, streams: bool = False) -> History:
    """Losses, gradients and the parameters at the end.

    Args:
        case: what is trained.
        offloads: with offloading.
        streams: what is copied is not released at once, as on a device whose copies take time.
    """
    engine = make_engine(case, offloads=offloads)
    offload = ds_fgoffload.get(engine)
    assert (offload is not None) == offloads
    if streams:
        offload._offloader._schedule._synchronous = False
    history: History = {}
    record_gradients(engine, history)
    observed: list[Observed] = []
    for step in range(case.steps):
        engine.set_train_batch_size(SEQUENCES * case.micro_batches_in(step) * engine.dp_world_size)
        if step and case.length_in(step) != case.length_in(step - 1):
            engine.reset_activation_shape()
        before = offload and offload.stats()
        history[f"loss {step}"] = engine.train_batch(case.batch(step)).clone()
        after = offload and offload.stats()
        leased_bytes = ds_fgoffload.host_pool().stats().leased_bytes
        left = left_in(engine, case.micro_batches_in(step))
        if step < case.steps - 1:
            history[f"evaluation {step}"] = engine.eval_batch(case.batch(step)).clone()
        if offload is not None:
            observed.append(Observed(before, after, offload.stats(), leased_bytes, left))
    history |= {f"parameter {name}": value.detach().clone() for name, value in engine.module.named_parameters()}
    keeps = buffers_kept_by(engine, releases=case.section.get("release_pipeline_buffers", False))
    engine.destroy()
    assert ds_fgoffload.get(engine) is None
    assert engine._INSTRUCTION_MAP is type(engine)._INSTRUCTION_MAP
    assert ds_fgoffload.host_pool().stats().pinned_bytes == 0
    for step, seen in enumerate(observed):
        check_step(case, step, seen, streams=streams)
        assert case.engine == "DualPipeV" or seen.left_in_engine == keeps
    return history


def left_in(engine: Any, micro_batches: int) -> set[str]:
    """Which of the buffers that the step has used hold something. (An evaluation may have used more of them.)"""
    used = min(micro_batches, max(2, engine.num_stages - engine.stage_id))
    names = ("inputs", "outputs", "labels")
    return {name for name in names if any(item is not None for item in engine.pipe_buffers[name][:used])}


def buffers_kept_by(engine: Any, *, releases: bool) -> set[str]:
    """What an engine has in its buffers after a step."""
    kept: set[str] = set()
    if not releases and engine.is_first_stage():
        kept |= {"inputs"}
    if not releases and engine.is_last_stage():
        kept |= {"outputs", "labels"}
    return kept


def check_step(case: Case, step: int, seen: Observed, *, streams: bool) -> None:
    before, after = seen.before, seen.after
    moved = after.offloaded_bytes - before.offloaded_bytes
    expected = case.saved_bytes(step)
    assert moved == expected if expected is not None else (moved > 0) == any(u.calls for u in after.units.values())
    used_in_place = after.used_in_place_bytes - before.used_in_place_bytes
    held = after.held_bytes - before.held_bytes
    assert after.reloaded_bytes - before.reloaded_bytes + used_in_place + held == moved
    assert used_in_place == 0 or streams
    assert held == 0 or case.loss_is_module  # the engine holds the labels that it saves
    if case.has_settled(step):
        assert after.late_reloads - before.late_reloads == 0, f"in step {step}, with streams: {streams}"
    assert (after.kept_bytes, after.live_host_bytes) == (0, 0)
    assert seen.leased_bytes == 0
    assert seen.after_evaluation == after


def differences(expected: History, found: History) -> list[str]:
    assert expected.keys() == found.keys()
    return [key for key, value in expected.items() if not torch.equal(value, found[key])]


def compare(case: Case, ways: tuple[bool, ...] = (False, True)) -> None:
    """``ways``: with ``streams``, without it, or both."""
    offloader.ALONE_BYTES = 1 << 20 if case.packed else 0
    expected = train(case, offloads=False)
    assert sum(key.startswith("gradient") for key in expected) > 0
    assert all(math.isfinite(value.float().sum()) for value in expected.values())
    for streams in ways:
        assert differences(expected, train(case, offloads=True, streams=streams)) == []


class Warnings(logging.Handler):
    """What this package warns of through DeepSpeed's logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "fine_grained_offload" in record.getMessage():
            self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logger.addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)


def one_warning(case: Case, *words: str) -> None:
    """One for the whole of training, with these words."""
    with Warnings() as messages:
        train(case, offloads=True)
    assert len(messages) == 1, messages
    assert all(word in messages[0] for word in words), messages


def no_warning(case: Case) -> None:
    with Warnings() as messages:
        train(case, offloads=True)
    assert messages == []


def refused(case: Case, message: str) -> None:
    """On every rank, also on those where a pattern matches; and nothing is left behind."""
    with pytest.raises(OffloadConfigError) as refusal:
        make_engine(case, offloads=True)
    assert str(refusal.value) == message
    compare(PLAIN)


def detached(case: Case) -> None:
    """The engine is DeepSpeed's own again, and keeps its buffers as it did."""
    engine = make_engine(case, offloads=True)
    mine, theirs = engine._INSTRUCTION_MAP, type(engine)._INSTRUCTION_MAP
    assert (mine is theirs) == (case.engine == "DualPipeV")
    engine.train_batch(case.batch(0))
    left = left_in(engine, case.micro_batches_in(0))
    offload = ds_fgoffload.get(engine)
    offload.detach()
    assert "_INSTRUCTION_MAP" not in vars(engine)
    assert engine._INSTRUCTION_MAP is theirs
    before = offload.stats()
    engine.train_batch(case.batch(1))
    assert offload.stats() == before
    left_detached = left_in(engine, case.micro_batches_in(0))
    kept = buffers_kept_by(engine, releases=case.engine == "DualPipeV")
    engine.destroy()
    assert left == set()
    assert left_detached == kept


def matrix(engine: str, stages: int, micro_batches: tuple[int, ...]) -> list[Case]:
    return [
        Case(engine, stages, count, outputs, kind, modules=EACH_LAYER if kind == "none" else ["*"])
        for outputs, kind, count in product(("tensor", "tuple"), ("none", *CHECKPOINTS), micro_batches)
    ]


def diagonal(cases: list[Case]) -> list[Case]:
    """Of a matrix with three numbers of micro-batches: each number with each kind of outputs and of checkpoints."""
    tensors, tuples = cases[:9], cases[9:]
    return [*(tensors[3 * i + (i + 2) % 3] for i in range(3)), *(tuples[3 * i + (i + 1) % 3] for i in range(3))]


RELEASES = {"release_pipeline_buffers": True}
LOSS_SETTLES_IN = 1
VARIANTS = {
    2: [
        Case("1F1B", 2, 3, tied=True, modules=["[0-9]", "tied_modules.embed"]),
        Case("DualPipeV", 2, 4, tied=True, modules=["[0-9]", "tied_modules.embed"]),
        *(
            Case(engine, 2, 4, loss_is_module=True, modules=modules, settles_in=LOSS_SETTLES_IN)
            for engine in ("1F1B", "DualPipeV")
            for modules in (["loss_fn"], ["*", "loss_fn"])
        ),
        *(Case("1F1B", 2, 3, modules=modules) for modules in (["[01]"], ["3", "3.fc*"])),
        Case("1F1B", 2, 3, checkpoint="non_reentrant"),
        # The unit inside offloads its input, and the unit around the checkpoint that of the layer: once each.
        Case("1F1B", 2, 3, checkpoint="non_reentrant", modules=["*.fc1", "*"], numbers_per_token=2 * WIDTH),
        *(
            Case("1F1B", 2, 3, checkpoint=f"deepspeed {kind}", modules=modules)
            for kind in ("reentrant", "non_reentrant")
            for modules in (EACH_LAYER, ["*"])
        ),
        Case("1F1B", 2, (2, 2, 6, 6, 3, 3), steps=6),
        Case("1F1B", 2, (6, 6, 1, 1), steps=4, checkpoint="reentrant", modules=["*"]),
        Case("DualPipeV", 2, (4, 4, 6, 6), "tuple", steps=4),
        *(
            Case("1F1B", 2, 3, outputs, steps=5, length=(3, 3, 5, 5, 2), **releases)
            for outputs, releases in (("tensor", {}), ("tuple", {"section": RELEASES}))
        ),
        Case("DualPipeV", 2, 4, steps=4, length=(3, 3, 5, 2)),
        Case("1F1B", 2, 4, dtype=torch.bfloat16),
        *(Case("1F1B", 2, 4, dtype=dtype, zero=1) for dtype in (torch.float32, torch.bfloat16)),
        *(Case("DualPipeV", 2, 4, dtype=dtype, zero=1) for dtype in (torch.float32, torch.bfloat16)),
        *(Case("1F1B", 2, 4, outputs, packed=True) for outputs in ("tensor", "tuple")),
    ],
    4: [
        *(Case("1F1B", 2, 4, dtype=dtype, zero=1) for dtype in (torch.float32, torch.bfloat16)),
        Case("1F1B", 4, (6, 6, 2, 2), steps=4, section=RELEASES),
        Case("DualPipeV", 4, 8, "tuple", steps=4, settles_in=2),
    ],
}
MATRICES = {
    2: [matrix("1F1B", 2, (1, 2, 6)), matrix("DualPipeV", 2, (4, 5, 6))],
    4: [matrix("1F1B", 4, (1, 2, 6))],
}
CHECKPOINTED = Case("1F1B", 2, 2, checkpoint="deepspeed reentrant")
NOWHERE = (
    'fine_grained_offload.modules: pattern "[0-3].fc3" matches no module (nearest: "0.fc1")\n'
    'fine_grained_offload.modules: pattern "class:Layr" matches no module (nearest: "class:Layer")'
)
OTHERS: dict[str, tuple[Any, ...]] = {
    "patterns that match nowhere": (refused, replace(PLAIN, modules=["[23]", "[0-3].fc3", "class:Layr"]), NOWHERE),
    "deepspeed.checkpointing around layers": (
        one_warning, replace(CHECKPOINTED, modules=["*"]), "deepspeed.checkpointing", "(whole model)",
        "torch.utils.checkpoint.checkpoint",
    ),
    "deepspeed.checkpointing around layers, non-reentrant": (
        one_warning, replace(CHECKPOINTED, modules=["*"], checkpoint="deepspeed non_reentrant"),
        "deepspeed.checkpointing", "(whole model)", "torch.utils.checkpoint.checkpoint",
    ),
    "units inside deepspeed.checkpointing": (one_warning, CHECKPOINTED, "nothing is offloaded", "reentrant"),
    "units inside non-reentrant checkpoints": (no_warning, replace(CHECKPOINTED, checkpoint="non_reentrant")),
    "detached, 1F1B": (detached, replace(PLAIN, section=RELEASES)),
    "detached, DualPipeV": (detached, Case("DualPipeV", 2, 4, section=RELEASES)),
}  # fmt: skip


_make_group = deepspeed.comm.new_group


@cache
def _group_of(ranks: tuple[int, ...]) -> Any:
    return _make_group(ranks)


def run_case(function: Any, *arguments: Any) -> None:
    deepspeed.comm.new_group = lambda ranks: _group_of(tuple(ranks))  # engines share groups: each costs threads
    function(*arguments)


def jobs(cases: Iterable[Case], *ways: tuple[bool, ...]) -> dict[str, tuple[Any, ...]]:
    return {case.name: (compare, case, *ways) for case in cases}


DIAGONALS = {2: [*diagonal(MATRICES[2][0]), *diagonal(MATRICES[2][1])], 4: diagonal(MATRICES[4][0])[::2]}
DEFAULT_JOBS = {ranks: jobs(DIAGONALS[ranks]) | jobs(VARIANTS[ranks], (True,)) for ranks in (2, 4)}
DEFAULT_JOBS[2] |= OTHERS
FULL_JOBS = {
    ranks: jobs((*(case for cases in MATRICES[ranks] for case in cases), *VARIANTS[ranks])) for ranks in (2, 4)
}


@cache
def outcomes(ranks: int, *, full: bool = False) -> dict[str, Outcome]:
    """All cases of a number of ranks share their processes."""
    if full:
        return run_cases(run_case, FULL_JOBS[ranks], ranks=ranks, timeout_s=900)
    return run_cases(run_case, DEFAULT_JOBS[ranks], ranks=ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("name", DEFAULT_JOBS[2])
def test_on_two_ranks(name: str) -> None:
    outcomes(2)[name].check()


@pytest.mark.ranks
@pytest.mark.parametrize("name", DEFAULT_JOBS[4])
def test_on_four_ranks(name: str) -> None:
    outcomes(4)[name].check()


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in FULL_JOBS.items() for name in names])
def test_every_cell_of_the_matrix(ranks: int, name: str) -> None:
    outcomes(ranks, full=True)[name].check()
