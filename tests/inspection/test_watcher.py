"""What is recorded of a micro-batch is what autograd saved, and what moves of it is what training would move."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_fgoffload
from ds_fgoffload.device.streams import SynchronousStreams
from ds_fgoffload.inspection.inventory import Inventory, StorageRecord
from ds_fgoffload.inspection.suggest import suggest
from ds_fgoffload.inspection.watcher import Watcher

ROWS, WIDTH = 4, 8
ROW_BYTES = ROWS * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x * 1.5)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.kept: list[Tensor] = []
        self.keep = self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            x = torch.tanh(x)
        if self.keep:
            self.kept.append(x)
        return x.sum()


def recorded(net: nn.Module, **changes: bool) -> tuple[Watcher, Inventory]:
    vars(net).update(changes)
    recorder = Watcher(net, SynchronousStreams(torch.device("cpu")))
    net(torch.ones(ROWS, WIDTH, requires_grad=True)).backward()
    return recorder, recorder.inventory


def facts(inventory: Inventory) -> list[tuple[str, int, str]]:
    return [(record.module, record.size_bytes, record.producer) for record in inventory.records]


def test_every_save_with_its_module_and_what_wrote_it() -> None:
    _, inventory = recorded(Net())
    block = [
        ("wide", ROW_BYTES, "mul"),
        ("", 4 * ROW_BYTES, "addmm"),
        ("narrow", 4 * ROW_BYTES, "gelu"),
    ]
    expected = []
    for number in range(2):
        expected += [(f"blocks.{number}.{name}".rstrip("."), *rest) for name, *rest in block]
        expected.append(("", ROW_BYTES, "tanh"))
    assert facts(inventory) == expected
    assert inventory.classes[""] == "Net"
    assert inventory.classes["blocks.1.narrow"] == "Linear"
    assert inventory.calls["blocks.0"] == 1


def test_what_moves_is_what_training_moves() -> None:
    net = Net()
    recorder, inventory = recorded(net)
    recorder.remove()
    for patterns, exclude in ((["blocks.*"], []), (["blocks.0.wide"], []), (["*"], ["blocks.1.narrow"])):
        offload = ds_fgoffload.attach(net, {"modules": patterns, "exclude": exclude, "min_tensor_bytes": 0})
        net(torch.ones(ROWS, WIDTH, requires_grad=True)).backward()
        units = offload.stats().units
        offload.detach()
        chosen = ds_fgoffload.selection.patterns.select(net, patterns, exclude)
        moves = inventory.moves(chosen.units, chosen.excluded)
        assert moves.moved_bytes == sum(unit.offloaded_bytes for unit in units.values()) > 0


def test_lifetimes_end_in_the_opposite_order() -> None:
    _, inventory = recorded(Net())
    assert all(record.lifetime_ms > 0 for record in inventory.records)
    uses = [record.used_at_ms for record in inventory.records]
    assert uses == sorted(uses, reverse=True)
    assert inventory.records[0].saved_at_ms < inventory.forward_ms < uses[-1]


def test_what_someone_else_holds_is_said() -> None:
    _, inventory = recorded(Net(), keep=True)
    assert [record.held for record in inventory.records] == [False] * 7 + [True]
    assert inventory.moves({""}).freed_bytes == inventory.eligible_bytes - ROW_BYTES
    assert inventory.moves({""}).moved_bytes == inventory.eligible_bytes


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return (self.q(x) + self.k(x)).sum()


def test_a_storage_that_two_modules_save_is_freed_by_both_together() -> None:
    _, inventory = recorded(Shared())
    (record,) = inventory.records
    assert record.shared
    assert len(record.saved_in) == 2
    assert inventory.moves({"q"}).freed_bytes == 0
    assert inventory.moves({"q"}).moved_bytes == ROW_BYTES
    assert inventory.moves({"q", "k"}).freed_bytes == ROW_BYTES
    assert inventory.moves({""}, {"k"}).freed_bytes == 0


def test_only_the_inputs_of_a_checkpoint_are_saved() -> None:
    _, inventory = recorded(Net(), checkpointed=True)
    assert facts(inventory)[1:] == [("", ROW_BYTES, "tanh")] * 2
    assert len(inventory.records) == 3  # the first block's input is the model's


def test_the_model_is_as_it_was_afterwards() -> None:
    net = Net()
    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]
    recorder, _ = recorded(net)
    recorder.remove()
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()] == before


def test_gradients_are_the_same_and_nothing_is_kept() -> None:
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    net(x).backward()
    plain, x.grad = x.grad.clone(), None
    recorder = Watcher(net, SynchronousStreams(torch.device("cpu")))
    loss = net(x)
    loss.backward()
    assert torch.equal(x.grad, plain)
    gc.collect()
    assert all(not seen.alive() for seen in recorder._seen.values())


def test_a_forward_that_raises_leaves_nothing_open() -> None:
    net = Net()
    recorder, _ = recorded(net)
    with pytest.raises(RuntimeError):
        net(torch.ones(ROWS, WIDTH + 1))
    assert recorder._stack == []
    y = torch.ones(3, requires_grad=True).exp()
    y.sum().backward()  # saved with no hook of ours
    recorder.remove()
    _, inventory = recorded(net)
    assert len(inventory.records) == 8


def test_a_forward_that_raises_is_shown_only_where_none_has_ended() -> None:
    class Failing(Net):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails:
                raise ValueError
            return y

    net = Failing()
    recorder = Watcher(net, SynchronousStreams(torch.device("cpu")))
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with pytest.raises(ValueError):
        net(x)
    assert recorder.inventory.records == []
    assert len(recorder.latest.records) == 8
    assert recorder.latest.forward_ms is None
    net.fails = False
    net(x)
    net.fails = True
    whole = recorder.inventory
    with pytest.raises(ValueError):
        net(x)
    assert recorder.latest is recorder.inventory is whole
    assert whole.forward_ms is not None


def test_what_changes_in_place_is_refused_as_ever() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(x)
            z = y.sum()
            y.add_(1)
            return z

    net = Changing()
    Watcher(net, SynchronousStreams(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(torch.ones(3, requires_grad=True)).backward()


def test_the_last_operation_that_wrote_it_is_named() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin((x * 2).add_(1)).sum()

    _, inventory = recorded(InPlace())
    assert [producer for _, _, producer in facts(inventory)] == ["add_"]


def test_a_backward_inside_forward_saves_for_itself() -> None:
    class Penalised(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(torch.exp(x).sum(), x, create_graph=True)
            return (x + slope).sum()

    _, inventory = recorded(Penalised())
    assert [producer for _, _, producer in facts(inventory)] == ["exp"]


def test_without_gradients_nothing_is_recorded() -> None:
    net = Net()
    recorder, inventory = recorded(net)
    with torch.no_grad():
        net(torch.ones(ROWS, WIDTH))
    assert recorder.inventory is inventory


def record(module: str, size_bytes: int, **changes: object) -> StorageRecord:
    values = {"dtype": "float32", "shape": (1,), "producer": "mm", "skip": None, "saved_in": [("", module)]}
    return StorageRecord(size_bytes=size_bytes, saved_at_ms=0, **{**values, **changes})


def test_small_storages_and_those_that_must_stay_do_not_move() -> None:
    inventory = Inventory(records=[record("a", 10), record("a", 100), record("a", 1000, skip="subclass")])
    moves = inventory.moves({"a"}, (), 50)
    assert (moves.storages, moves.moved_bytes) == (1, 100)
    assert inventory.eligible_bytes == 110


def test_suggestions_are_sections_that_do_what_they_say() -> None:
    net = Net()
    recorder, inventory = recorded(net)
    recorder.remove()
    found = suggest(net, inventory, 0)
    assert [(s.title, s.modules) for s in found] == [
        ("few large copies", ("blocks.*.narrow", "blocks.*.wide")),
        ("as much as possible", ("blocks.*",)),
    ]
    for suggestion in found:
        units = ds_fgoffload.selection.patterns.select(net, suggestion.modules).units
        assert inventory.moves(units) == suggestion.moves
    assert suggest(net, inventory, 1 << 20) == []
