"""Units around, at and inside checkpointed regions: the same bits, and what moves in each case. docs/composition.md."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ds_fgoffload
from ds_fgoffload.engines.checkpoints import ALTERNATIVE
from ds_fgoffload.runtime.hooks import ModuleHook
from ds_fgoffload.text.names import abbreviated

ROWS, WIDTH, BLOCKS, STEPS = 4, 8, 3, 3
INPUT_BYTES = ROWS * WIDTH * 4
MLP_BYTES = (1 + 4 + 4 + 4) * INPUT_BYTES
"""Its input, what tanh returns, the noise of dropout, the input of the last layer."""
BLOCK_BYTES = MLP_BYTES + INPUT_BYTES + 2 * ROWS * 4
"""And the input of the norm with its means and deviations."""
NET_BYTES = 2 * INPUT_BYTES
"""The input of the first layer, and the output that is squared."""

reentrant = functools.partial(checkpoint, use_reentrant=True)
non_reentrant = functools.partial(checkpoint, use_reentrant=False)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Mlp(nn.Module):
    """Tanh saves what it returns, dropout shows a recompute that has not the random state of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.made_again: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        tanh = torch.tanh(self.wide(x))
        if in_backward():
            self.made_again += [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, tanh)]
        return self.narrow(F.dropout(tanh, 0.3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.checkpoint: Callable[..., Tensor] | None = None
        self.reruns = 0

    def forward(self, x: Tensor) -> Tensor:
        self.reruns += in_backward()
        return x + self.mlp(self.norm(x))


class CallCheckpointed(Block):
    """As ``GradientCheckpointingLayer`` of transformers 4: the module's hooks run inside the checkpoint."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.checkpoint(super().__call__, x) if self.checkpoint else super().__call__(x)


class ForwardCheckpointed(Block):
    """As ``GradientCheckpointingLayer`` of transformers 5: the module's hooks run outside the checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return self.checkpoint(super().forward, x) if self.checkpoint else super().forward(x)


@dataclass(frozen=True)
class Kind:
    checkpoint: Callable[..., Any]
    reentrant: bool
    block: type[Block] = Block
    inputs_are_seen: bool = True

    @property
    def block_is_around(self) -> bool:
        return self.block is ForwardCheckpointed


KINDS = {
    "torch reentrant": Kind(reentrant, reentrant=True),
    "torch non-reentrant": Kind(non_reentrant, reentrant=False),
    "deepspeed": Kind(deepspeed_checkpointing.checkpoint, reentrant=True, inputs_are_seen=False),
    "deepspeed non-reentrant": Kind(
        deepspeed_checkpointing.non_reentrant_checkpoint, reentrant=False, inputs_are_seen=False
    ),
    "layer's call reentrant": Kind(reentrant, reentrant=True, block=CallCheckpointed),
    "layer's call non-reentrant": Kind(non_reentrant, reentrant=False, block=CallCheckpointed),
    "layer's forward reentrant": Kind(reentrant, reentrant=True, block=ForwardCheckpointed),
    "layer's forward non-reentrant": Kind(non_reentrant, reentrant=False, block=ForwardCheckpointed),
}
OWN = ("deepspeed", "deepspeed non-reentrant")
PLACES = {
    "around": ["*"],
    "is the block": ["blocks.*"],
    "inside": ["blocks.*.mlp"],
    "both": ["*", "blocks.*.mlp"],
}


class Net(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind.block() for _ in range(BLOCKS))
        self.kind = kind
        self.inputs: list[StorageWeakRef] = []
        if kind.block is not Block:
            for block in self.blocks:
                block.checkpoint = kind.checkpoint

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            self.inputs.append(StorageWeakRef(x.untyped_storage()))
            x = block(x) if self.kind.block is not Block else self.kind.checkpoint(block, x)
        return x.square().mean()

    def reruns(self) -> int:
        return sum(block.reruns for block in self.blocks)


@dataclass(frozen=True)
class Cell:
    kind: Kind
    place: str

    @property
    def has_unit_around(self) -> bool:
        return self.place in {"around", "both"} or (self.place == "is the block" and self.kind.block_is_around)

    @property
    def inputs_move(self) -> bool:
        return self.has_unit_around and self.kind.inputs_are_seen

    @property
    def has_unit_inside(self) -> bool:
        return self.place in {"inside", "both"} or (self.place == "is the block" and not self.kind.block_is_around)

    @property
    def region_moves(self) -> bool:
        return self.has_unit_inside and not self.kind.reentrant

    @property
    def is_recomputed(self) -> bool:
        """If all that a non-reentrant checkpoint would keep is offloaded, it has nothing to do, and keeps no input."""
        return not (self.region_moves and self.place == "is the block")

    @property
    def is_recomputed_to_the_end(self) -> bool:
        """Torch ends a non-reentrant recompute at the last tensor that it needs; DeepSpeed does not."""
        needs_no_more = self.region_moves and self.kind.checkpoint is non_reentrant
        return self.is_recomputed and not needs_no_more

    @property
    def step_bytes(self) -> int:
        region_bytes = BLOCK_BYTES if self.place == "is the block" else MLP_BYTES
        return (
            (NET_BYTES if self.place in {"around", "both"} else 0)
            + (BLOCKS * INPUT_BYTES if self.inputs_move else 0)
            + (BLOCKS * region_bytes if self.region_moves else 0)
        )

    @property
    def idle_units(self) -> list[str]:
        if not self.has_unit_inside or not self.kind.reentrant:
            return []
        return [f"blocks.{i}" if self.place == "is the block" else f"blocks.{i}.mlp" for i in range(BLOCKS)]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert ds_fgoffload.host_pool().stats().leased_bytes == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records if "fine_grained_offload" in record.getMessage()]


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def step_of(net: nn.Module, step: int, after_forward: Callable[[], None] = lambda: None) -> list[Tensor]:
    torch.manual_seed(step)
    net.zero_grad()
    loss = net(batch(step))
    after_forward()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in net.parameters())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def pair(kind: Kind) -> tuple[Net, Net]:
    torch.manual_seed(0)
    net = Net(kind)
    return net, deepcopy(net)


def attach(net: nn.Module, modules: list[str]) -> Any:
    return ds_fgoffload.attach(net, {"modules": modules, "min_tensor_bytes": 0})


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_moves(kind: str, place: str, warnings: Callable[[], list[str]]) -> None:
    cell = Cell(KINDS[kind], place)
    plain, net = pair(cell.kind)
    offload = attach(net, PLACES[place])

    def inputs_are_gone() -> None:
        assert [reference.expired() for reference in net.inputs] == BLOCKS * [
            cell.inputs_move or not cell.is_recomputed
        ]

    for step in range(STEPS):
        before = offload.stats()
        net.inputs.clear()
        assert_same(step_of(net, step, inputs_are_gone), step_of(plain, step))
        after = offload.stats()
        assert after.offloaded_bytes - before.offloaded_bytes == cell.step_bytes
        assert after.reloaded_bytes - before.reloaded_bytes == cell.step_bytes
        assert step == 0 or after.late_reloads == before.late_reloads
        assert after.live_host_bytes == 0
        assert net.reruns() == (BLOCKS * (step + 1) if cell.is_recomputed else 0)
        made_again = [reference for block in net.blocks for reference in block.mlp.made_again]
        assert bool(made_again) == cell.is_recomputed_to_the_end
        assert all(reference.expired() for reference in made_again)

    said = "\n".join(warnings())
    report = offload.report()
    unseen = cell.has_unit_around and not cell.kind.inputs_are_seen
    assert len(warnings()) == unseen + bool(cell.idle_units)
    assert ("deepspeed.checkpointing runs in (whole model) and keeps its inputs" in said) == unseen
    assert (ALTERNATIVE in said) == unseen
    assert ("unit (whole model): deepspeed.checkpointing keeps its inputs where no hook sees them" in report) == unseen
    idle = abbreviated(cell.idle_units)
    assert (f": {idle}: nothing is offloaded of units inside" in said) == bool(idle)
    assert (f"{idle} saved nothing: they were only called in reentrant checkpoints" in report) == bool(idle)
    offload.detach()


def test_the_matrix_in_the_documents_has_these_rows_and_columns() -> None:
    page = (Path(__file__).parents[2] / "docs/composition.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in page.splitlines() if line[:2] == "| "]
    start = rows.index(["checkpoint", *PLACES])
    assert [row[0] for row in rows[start + 1 : start + 1 + len(KINDS)]] == list(KINDS)


DEEPSPEED = pytest.mark.parametrize("kind", OWN)


@DEEPSPEED
def test_an_evaluation_before_training_does_not_count_as_the_first_forward(
    kind: str, warnings: Callable[[], list[str]]
) -> None:
    _, net = pair(KINDS[kind])
    offload = attach(net, ["*"])
    with torch.no_grad():
        net(batch(0))
    assert warnings() == []
    step_of(net, 0)
    assert len(warnings()) == 1
    assert offload.stats().units[""].unseen_checkpoints == BLOCKS
    step_of(net, 1)
    assert len(warnings()) == 1
    offload.detach()


@DEEPSPEED
def test_nothing_is_said_where_deepspeed_moves_the_inputs_itself(
    kind: str, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_checkpointing, "CPU_CHECKPOINT", True)
    _, net = pair(KINDS[kind])
    offload = attach(net, ["*"])
    net(batch(0))  # no backward: on a CPU, DeepSpeed empties the very tensors that it keeps
    assert warnings() == []
    offload.detach()


@pytest.mark.parametrize("fails", [False, True])
def test_looking_for_deepspeeds_checkpoints_ends_with_the_first_forward(fails: bool) -> None:
    def hooks(module: nn.Module) -> list[Any]:
        found = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        return [hook for hook in found if isinstance(hook, ModuleHook)]

    def fail(*_: Any) -> None:
        raise ValueError

    _, net = pair(KINDS["deepspeed"])
    offload = attach(net, ["blocks.0"])
    if fails:
        failing = net.blocks[-1].register_forward_pre_hook(fail)
        with pytest.raises(ValueError):
            step_of(net, 0)
        failing.remove()
    else:
        step_of(net, 0)
    assert [name for name, module in net.named_modules() if hooks(module)] == ["", "blocks.0"]
    offload.detach()
    assert not any(hooks(module) for module in net.modules())


def test_a_unit_that_is_called_inside_and_outside_a_reentrant_checkpoint_is_of_use(
    warnings: Callable[[], list[str]],
) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.unit, self.unit(x), use_reentrant=True).sum()

    net = Both()
    plain = deepcopy(net)
    offload = attach(net, ["unit"])
    for step in range(STEPS):
        assert_same(step_of(net, step), step_of(plain, step))
    assert offload.stats().offloaded_bytes == STEPS * 2 * INPUT_BYTES
    assert warnings() == []
    assert "reentrant" not in offload.report()
    offload.detach()


HIDDEN, TOKENS, LAYERS = 32, 6, 3


def qwen3(*, use_reentrant: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: no real model to try")
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attention_dropout=0.1,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).train()
    # the second is its name before transformers 5
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    return model


@pytest.mark.parametrize("modules", [["model"], ["model", "model.layers.*.mlp"], ["model.layers.*.mlp"]], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_of_transformers(use_reentrant: bool, modules: list[str]) -> None:
    plain, model = (qwen3(use_reentrant=use_reentrant) for _ in range(2))
    offload = attach(model, modules)
    inputs: list[StorageWeakRef] = []

    def note_input(_layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if not in_backward():
            inputs.append(StorageWeakRef(arguments[0].untyped_storage()))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(note_input)

    def step(net: nn.Module, number: int, *, look: bool) -> list[Tensor]:
        torch.manual_seed(number)
        net.zero_grad()
        tokens = torch.randint(64, (1, TOKENS))
        loss = F.cross_entropy(net(tokens).logits.flatten(0, 1), tokens.flatten())
        if look:
            assert [reference.expired() for reference in inputs] == LAYERS * ["model" in modules]
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in net.parameters())]

    late = 0
    for number in range(STEPS):
        inputs.clear()
        assert_same(step(model, number, look=True), step(plain, number, look=False))
        stats = offload.stats()
        late = stats.late_reloads if number == 0 else late
        assert stats.late_reloads == late
        assert stats.live_host_bytes == 0
    in_mlps = sum(unit.offloaded_bytes for name, unit in stats.units.items() if name.endswith("mlp"))
    assert (in_mlps > 0) == (len(modules) + (modules[0] != "model") > 1 and not use_reentrant)
    if "model" in modules:
        assert stats.units["model"].offloaded_bytes >= STEPS * LAYERS * TOKENS * HIDDEN * 4
    offload.detach()
