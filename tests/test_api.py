"""What users call: where the section may stand, what attaching and detaching leave behind, and what is counted."""

from __future__ import annotations

import argparse
import copy
import gc
import io
import json
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ds_fgoffload
from ds_fgoffload import OffloadConfigError, OffloadStateError, OffloadStats, UnitStats
from ds_fgoffload.config import parse_config
from tests.helpers.distributed import one_rank

ROWS, WIDTH = 4, 8
SECTION: dict[str, Any] = {"modules": ["blocks.*"], "min_tensor_bytes": 0}
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
WHOLE: dict[str, Any] = {**DS_CONFIG, "fine_grained_offload": SECTION}
BLOCK_BYTES = ROWS * 3 * WIDTH * 4
"""A block saves its input, and the input of its second layer, which is twice as wide."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x) * 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.gelu(block(x * 1.5))
        return x.sum()


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    if ds_fgoffload.host_pool().stats().pinned_bytes:
        gc.collect()
    stats = ds_fgoffload.host_pool().stats()
    assert (stats.leased_bytes, stats.pinned_bytes) == (0, 0)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(net: nn.Module) -> list[Tensor]:
    net.zero_grad()
    net(rows()).backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def hooks(module: nn.Module) -> list[list[list[Any]]]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return [[list(getattr(m, kind).items()) for kind in kinds] for m in module.modules()]


def initialized(net: Net, *args: Any, **kwargs: Any) -> Any:
    return ds_fgoffload.initialize(*args, model=net, model_parameters=net.parameters(), **kwargs)[0]


HJSON = """{
  # comments and bare keys, as DeepSpeed reads them
  train_micro_batch_size_per_gpu: 4
  optimizer: {type: "AdamW", params: {lr: 0.01, torch_adam: true}}
  zero_optimization: {stage: 1}
  fine_grained_offload: {modules: ["blocks.*"], min_tensor_bytes: 0}
}"""


@pytest.mark.parametrize("way", ["config", "config_params", "json file", "hjson file", "args", "positional args"])
def test_initialize_finds_the_section_wherever_deepspeed_finds_its_config(net: Net, tmp_path: Path, way: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(HJSON if way == "hjson file" else json.dumps(WHOLE))
    arguments = argparse.Namespace(deepspeed_config=str(path), local_rank=0)
    engine = {
        "config": lambda: initialized(net, config=copy.deepcopy(WHOLE)),
        "config_params": lambda: initialized(net, config_params=copy.deepcopy(WHOLE)),
        "json file": lambda: initialized(net, config=str(path)),
        "hjson file": lambda: initialized(net, config=str(path)),
        "args": lambda: initialized(net, args=arguments),
        "positional args": lambda: initialized(net, arguments),
    }[way]()
    offload = ds_fgoffload.get(engine)
    assert offload is not None
    engine.backward(engine(rows()))
    engine.step()
    assert offload.stats().offloaded_bytes == 2 * BLOCK_BYTES
    engine.destroy()
    assert ds_fgoffload.get(engine) is None


@pytest.mark.parametrize("section", [None, {**SECTION, "enabled": False}])
def test_initialize_leaves_an_engine_alone_without_an_enabled_section(net: Net, section: dict[str, Any] | None) -> None:
    config = DS_CONFIG if section is None else {**DS_CONFIG, "fine_grained_offload": section}
    returned = ds_fgoffload.initialize(model=net, model_parameters=net.parameters(), config=config)
    assert [type(part).__name__ for part in returned] == [
        "DeepSpeedEngine",
        "DeepSpeedZeroOptimizer",
        "NoneType",
        "NoneType",
    ]
    assert ds_fgoffload.get(returned[0]) is None
    assert "ds_fgoffload" not in str(hooks(net))


@pytest.mark.parametrize("way", ["config", "config_params", "args"])
def test_a_bad_section_is_refused_before_an_engine_is_built(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    bad = {**DS_CONFIG, "fine_grained_offload": {"module": ["blocks.*"]}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(bad))
    given = {
        "config": {"config": bad},
        "config_params": {"config_params": bad},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path))},
    }[way]
    built: list[Any] = []
    monkeypatch.setattr(deepspeed, "initialize", lambda *_args, **_kwargs: built.append(1))
    with pytest.raises(OffloadConfigError, match=r'fine_grained_offload.module: unknown key \(nearest: "modules"\)'):
        initialized(net, **given)
    assert built == []


def test_a_pattern_without_match_names_the_nearest(net: Net) -> None:
    with pytest.raises(OffloadConfigError, match=r'"block.0" matches no module \(nearest: "blocks.0"'):
        ds_fgoffload.attach(net, {"modules": ["block.0"]})
    assert ds_fgoffload.get(net) is None
    assert "ds_fgoffload" not in str(hooks(net))


def _file(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(WHOLE))
    return path


GIVEN: dict[str, Callable[[Path], Any]] = {
    "section": lambda _: SECTION,
    "whole": lambda _: WHOLE,
    "whole, that DeepSpeed would refuse": lambda _: {"fine_grained_offload": SECTION},
    "path": _file,
    "text": lambda tmp_path: str(_file(tmp_path)),
    "parsed": lambda _: parse_config(SECTION),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("to", ["module", "engine"])
def test_attach_takes_the_section_in_any_form(net: Net, tmp_path: Path, given: Callable[[Path], Any], to: str) -> None:
    target = net
    if to == "engine":
        target = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=DS_CONFIG)[0]
    offload = ds_fgoffload.attach(target, given(tmp_path))
    assert ds_fgoffload.get(target) is offload
    assert list(offload.stats().units) == ["blocks.0", "blocks.1"]
    offload.detach()


def test_attach_takes_the_section_that_the_engine_was_made_with(net: Net) -> None:
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=WHOLE)[0]
    assert ds_fgoffload.get(engine) is None
    offload = ds_fgoffload.attach(engine)
    assert list(offload.stats().units) == ["blocks.0", "blocks.1"]
    offload.detach()


@pytest.mark.parametrize("config", [None, DS_CONFIG])
def test_attach_needs_a_section(net: Net, config: dict[str, Any] | None) -> None:
    with pytest.raises(OffloadConfigError, match="no such section in the"):
        ds_fgoffload.attach(net, config)


@pytest.mark.parametrize("target", [None, 3, lambda x: x, Net])
def test_only_modules_can_be_attached_to(target: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot attach to a \w+: a DeepSpeed engine or a torch.nn.Module is needed"):
        ds_fgoffload.attach(target, SECTION)


def test_a_disabled_section_attaches_and_offloads_nothing(net: Net) -> None:
    offload = ds_fgoffload.attach(net, {**SECTION, "enabled": False})
    gradients(net)
    assert offload.stats() == OffloadStats()
    offload.detach()


def test_attaching_twice_is_refused_and_detaching_twice_is_harmless(net: Net) -> None:
    before = hooks(net)
    offload = ds_fgoffload.attach(net, SECTION)
    with pytest.raises(
        OffloadStateError,
        match=r"attached to this Net already: call ds_fgoffload\.get\(model\)\.detach\(\) first",
    ):
        ds_fgoffload.attach(net, SECTION)
    assert ds_fgoffload.get(net) is offload
    assert hooks(net) != before
    for _ in range(2):
        offload.detach()
        assert hooks(net) == before
        assert ds_fgoffload.get(net) is None
        assert vars(net).keys() == vars(Net()).keys()
    again = ds_fgoffload.attach(net, SECTION)
    offload.detach()  # the old attachment has no say any more
    assert ds_fgoffload.get(net) is again
    gradients(net)
    assert again.stats().offloaded_bytes == 2 * BLOCK_BYTES
    assert offload.stats().offloaded_bytes == 0
    again.detach()


def test_detaching_from_an_engine_gives_back_its_own_destroy(net: Net) -> None:
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=WHOLE)[0]
    before = hooks(net), vars(engine).keys() | set()
    ds_fgoffload.attach(engine).detach()
    assert (hooks(net), vars(engine).keys()) == before


def test_a_graph_outlives_detaching(net: Net) -> None:
    expected = gradients(net)
    net.zero_grad()
    offload = ds_fgoffload.attach(net, SECTION)
    loss = net(rows())
    offload.detach()
    assert offload.stats().live_host_bytes > 0
    loss.backward()
    del loss
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), expected, strict=True))
    stats = offload.stats()
    assert (stats.live_host_bytes, stats.reloaded_bytes) == (0, 2 * BLOCK_BYTES)


@pytest.mark.parametrize("to", ["module", "engine"])
def test_an_attachment_goes_with_what_it_is_attached_to(to: str) -> None:
    net = Net()
    target: Any = net
    if to == "engine":  # under ZeRO 1-3 DeepSpeed itself keeps an engine alive that was not destroyed
        target = initialized(net, config={**WHOLE, "zero_optimization": {"stage": 0}})
        target.backward(target(rows()))
        target.step()
    else:
        ds_fgoffload.attach(net, SECTION)
        gradients(net)
    watched = [weakref.ref(target), weakref.ref(ds_fgoffload.get(target))]
    assert ds_fgoffload.host_pool().stats().pinned_bytes > 0
    del target, net
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert ds_fgoffload.host_pool().stats().pinned_bytes == 0


def test_an_attachment_tells_its_own_peak_of_the_pool(net: Net) -> None:
    peaks = []
    for trains in (True, False):
        offload = ds_fgoffload.attach(net, SECTION)
        if trains:
            gradients(net)
        peaks.append(offload.stats().peak_host_bytes)
        assert ("peak 0 B leased" in offload.report()) is not trains
        offload.detach()
        assert offload.stats().peak_host_bytes == peaks[-1]
    assert peaks[0] >= 2 * BLOCK_BYTES
    assert peaks[1] == 0


def test_the_report_can_be_printed_where_it_is_asked_for(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = ds_fgoffload.attach(net, SECTION)
    assert "│" in offload.report()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print(offload.report())
    offload.detach()


def test_the_last_of_two_users_of_the_pool_frees_it(net: Net) -> None:
    other = Net()
    for module in (net, other):
        ds_fgoffload.attach(module, SECTION)
        gradients(module)
    ds_fgoffload.get(net).detach()
    assert ds_fgoffload.host_pool().stats().pinned_bytes > 0
    ds_fgoffload.get(other).detach()
    assert ds_fgoffload.host_pool().stats().pinned_bytes == 0


def _saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved_and_loaded,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_an_attached_module_is_not_attached(net: Net, copied: Callable[[nn.Module], nn.Module]) -> None:
    expected = gradients(net)
    offload = ds_fgoffload.attach(net, SECTION)
    twin = copied(net)
    assert ds_fgoffload.get(twin) is None
    found = gradients(twin)
    assert offload.stats().units["blocks.0"].calls == 0
    assert ds_fgoffload.host_pool().stats().leased_bytes == 0
    assert all(map(torch.equal, expected, found))
    own = ds_fgoffload.attach(twin, SECTION)
    found = gradients(twin)
    assert all(map(torch.equal, expected, found))
    assert (own.stats().offloaded_bytes, offload.stats().offloaded_bytes) == (2 * BLOCK_BYTES, 0)
    own.detach()
    offload.detach()


def test_state_dicts_are_as_before(net: Net) -> None:
    before = list(net.state_dict())
    offload = ds_fgoffload.attach(net, SECTION)
    assert list(net.state_dict()) == before
    offload.detach()


class Interrupted(Block):
    interrupts = True

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupts:
            raise KeyboardInterrupt
        return super().forward(x)


def test_an_interrupt_inside_a_unit_spoils_nothing_after_it(net: Net) -> None:
    """Module hooks do not see it: what it left open is closed when the next forward begins, or on detaching."""
    net.blocks.append(Interrupted())
    offload = ds_fgoffload.attach(net, SECTION)
    for end in (lambda: gradients(net), offload.detach):
        net.blocks[-1].interrupts = True
        with pytest.raises(KeyboardInterrupt):
            net(rows())
        net.blocks[-1].interrupts = False
        end()
        assert not saving_is_hooked()
    found = offload.stats()
    assert {unit.saved_bytes for unit in found.units.values()} == {BLOCK_BYTES, 3 * BLOCK_BYTES}
    assert found.live_host_bytes == 0


def saving_is_hooked() -> bool:
    """Whether saved-tensor hooks are active here, outside any unit."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


BIG = 1 << 20


class Five(nn.Module):
    """One unit is useful, one never called, one saves too little, one what is held elsewhere, one is left no room."""

    def __init__(self) -> None:
        super().__init__()
        self.useful, self.uncalled, self.small, self.held, self.full = (Square() for _ in range(5))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        total = self.useful(x * 1.0).sum() + self.small(x[:8] * 1.0).sum()
        self.kept = [x * 2.0]
        return total + self.held(self.kept[0]).sum() + self.full(x * 3.0).sum()


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def test_counts_add_up_and_the_report_names_what_was_useless() -> None:
    module = Five()
    section = {"modules": ["class:Square"], "min_tensor_bytes": 1024, "host_pool": {"max_bytes": 2 * BIG}}
    offload = ds_fgoffload.attach(module, section)
    x = torch.randn(BIG // 4, requires_grad=True)
    loss = module(x)
    alive = offload.stats()
    assert alive.live_host_bytes == 2 * BIG
    loss.backward()
    del loss
    stats = offload.stats()
    assert (
        stats.units
        == {
            "useful": UnitStats(calls=1, saved_bytes=BIG, offloaded_bytes=BIG, reloaded_bytes=BIG),
            "uncalled": UnitStats(),
            "small": UnitStats(calls=1, skipped=Counter(too_small=1)),
            "held": UnitStats(calls=1, saved_bytes=BIG, offloaded_bytes=BIG, held_bytes=BIG),
            "full": UnitStats(calls=1, saved_bytes=BIG, kept_bytes=BIG, skipped=Counter(host_full=1)),
        }
        or stats.units["useful"].late_reloads == 1
    )
    check_conservation(stats)
    assert stats.live_host_bytes == 0
    assert alive.live_host_bytes == 2 * BIG  # a snapshot stays as it was

    text = offload.report()
    assert "unit uncalled saved nothing: it was never called with gradients enabled" in text
    assert "unit small saved nothing that may be offloaded (too_small 1)" in text
    assert "unit held freed nothing: something else held every storage until backward" in text
    assert "rank 0: saved tensors left on the device, by reason: host_full 1, too_small 1" in text
    assert [word for word in ("useful", "full") if f"unit {word}" in text] == []
    offload.detach()
    assert offload.stats() == stats
    assert offload.report().count("1.0 MiB") >= 4


def check_conservation(stats: OffloadStats) -> None:
    for counts in (stats, *stats.units.values()):
        assert counts.saved_bytes == counts.offloaded_bytes + counts.kept_bytes
        assert counts.offloaded_bytes == counts.reloaded_bytes + counts.held_bytes + counts.used_in_place_bytes
    of_units = (
        "calls",
        "skipped",
        "compiled",
        "recompute",
        "recomputed_calls",
        "recompute_refused",
        "unseen_checkpoints",
    )
    summed = [f.name for f in fields(UnitStats) if f.name not in of_units]
    for name in summed:
        assert getattr(stats, name) == sum(getattr(unit, name) for unit in stats.units.values())
    assert stats.skipped == sum((unit.skipped for unit in stats.units.values()), Counter())


def test_what_no_backward_needed_is_dropped(net: Net) -> None:
    offload = ds_fgoffload.attach(net, SECTION)
    loss = net(rows())
    assert offload.stats().live_host_bytes >= 2 * BLOCK_BYTES
    del loss
    stats = offload.stats()
    assert (stats.offloaded_bytes, stats.reloaded_bytes, stats.live_host_bytes) == (2 * BLOCK_BYTES, 0, 0)
    offload.detach()


def test_gathered_counts_are_plain_numbers(net: Net) -> None:
    offload = ds_fgoffload.attach(net, SECTION)
    gradients(net)
    (counts,) = json.loads(json.dumps(offload.gathered_counts()))
    assert counts["rank"] == 0
    assert counts["offloaded_bytes"] == counts["reloaded_bytes"] == 2 * BLOCK_BYTES
    assert counts["skipped"] == {"parameter": 3}
    assert counts["units"]["blocks.1"]["saved_bytes"] == BLOCK_BYTES
    assert counts["pool_leased_bytes"] == 0
    assert counts["pool_pinned_bytes"] > 0
    offload.detach()
