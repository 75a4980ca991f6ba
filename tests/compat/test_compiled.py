"""Beside ``torch.compile``: what lies in compiled code is said, all else is offloaded, and nothing is recompiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import ds_fgoffload
from ds_fgoffload import OffloadConfigError
from tests.helpers.distributed import one_rank

ROWS, WIDTH, STEPS = 4, 8, 3
BLOCKS, MANY = 2, 10
"""``MANY`` is more than Dynamo's limit of recompilations, 8."""
MLP_BYTES = ROWS * (1 + 4 + 4) * WIDTH * 4
"""The input, and those of GELU and of the last layer."""
BLOCK_BYTES = MLP_BYTES + ROWS * (WIDTH + 2) * 4
"""And the input of the norm with its means and deviations."""
WARNING = "torch.compile has compiled what they lie in"

ENDS_BYTES = 2 * ROWS * WIDTH * 4
"""What the model itself saves: the input of its first layer, and the output that is squared."""

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class DeepNet(Net):
    def __init__(self) -> None:
        super().__init__(MANY)


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    assert ds_fgoffload.host_pool().stats().leased_bytes == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records if "fine_grained_offload" in record.getMessage()]


def make(of: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return of()


def train(
    call: Callable[[Tensor], Tensor], net: nn.Module, backward: Callable[[Tensor], Any] = Tensor.backward
) -> list[Tensor]:
    made = []
    for step in range(STEPS):
        net.zero_grad()
        loss = call(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)))
        backward(loss)
        made += [loss.detach(), *(p.grad for p in net.parameters())]
    return made


def compilations() -> dict[str, Any]:
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
        "limits": dict(counters["recompile_limit"]),
    }


Way = Callable[[nn.Module, str], Callable[[Tensor], Tensor]]
"""Compiles a model, and returns what to call."""


def whole(net: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    net.compile(backend=backend)
    return net


def wrapped(net: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    return torch.compile(net, backend=backend)


def each_block(net: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    for block in net.blocks:
        block.compile(backend=backend)
    return net


def each_mlp(net: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    for block in net.blocks:
        block.mlp.compile(backend=backend)
    return net


def each_block_wrapped(net: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = torch.compile(block, backend=backend)
    return net


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def compare(
    compile_it: Way,
    backend: str,
    modules: list[str],
    *,
    compiled_first: bool,
    of: Callable[[], nn.Module] = Net,
    **section: Any,
) -> Any:
    """Trains a compiled model with and without offloading: the same bits, from the same number of compilations."""
    plain, net = make(of), make(of)
    expected = train(compile_it(plain, backend), plain)
    without = compilations()
    torch._dynamo.reset()
    counters.clear()
    call = compile_it(net, backend) if compiled_first else net
    offload = ds_fgoffload.attach(net, {"modules": modules, "min_tensor_bytes": 0, **section})
    if not compiled_first:
        call = compile_it(net, backend)
    assert_same(train(call, net), expected)
    assert compilations() == without
    assert without["graphs"] == 1
    stats = offload.stats()
    assert (stats.late_reloads, stats.live_host_bytes) == (0, 0)
    assert stats.reloaded_bytes == stats.offloaded_bytes
    return offload


WAYS = pytest.mark.parametrize(
    ("backend", "compiled_first"),
    [("eager", True), ("eager", False), ("aot_eager", False)],
    ids=["eager, compiled first", "eager, attached first", "aot_eager"],
)
EITHER_ORDER = pytest.mark.parametrize("compiled_first", [True, False], ids=["compiled first", "attached first"])


@WAYS
@pytest.mark.parametrize(
    ("compile_it", "modules", "step_bytes"),
    [
        (each_mlp, ["blocks.*"], BLOCKS * BLOCK_BYTES),
        (each_mlp, ["blocks.*.mlp"], BLOCKS * MLP_BYTES),
        (each_mlp, ["*", "blocks.*.mlp"], BLOCKS * BLOCK_BYTES + ENDS_BYTES),
        (each_block, ["blocks.*"], BLOCKS * BLOCK_BYTES),
        (each_block, ["*"], BLOCKS * BLOCK_BYTES + ENDS_BYTES),
        (whole, ["*"], BLOCKS * BLOCK_BYTES + ENDS_BYTES),
        (wrapped, ["*"], BLOCKS * BLOCK_BYTES + ENDS_BYTES),
    ],
)
def test_a_unit_at_or_around_compiled_code_is_offloaded(
    compile_it: Way, modules: list[str], step_bytes: int, backend: str, compiled_first: bool, warnings: Any
) -> None:
    offload = compare(compile_it, backend, modules, compiled_first=compiled_first)
    assert offload.stats().offloaded_bytes == STEPS * step_bytes
    assert warnings() == []
    assert "saved nothing" not in offload.report()
    offload.detach()


@EITHER_ORDER
@pytest.mark.parametrize("modules", ["blocks.*", "blocks.*.mlp", "*"])
@pytest.mark.parametrize("compile_it", [each_block, each_mlp])
def test_modules_compiled_one_by_one_still_share_a_graph(compile_it: Way, modules: str, compiled_first: bool) -> None:
    """A hook of its own on each would have Dynamo compile each, and give up at the ninth."""
    compare(compile_it, "eager", [modules], compiled_first=compiled_first, of=DeepNet).detach()


@WAYS
@pytest.mark.parametrize(("compile_it", "modules"), [(whole, "blocks.*"), (each_block, "blocks.*.mlp")])
def test_a_unit_inside_compiled_code_is_named(
    compile_it: Way, modules: str, backend: str, compiled_first: bool, warnings: Any
) -> None:
    offload = compare(compile_it, backend, [modules], compiled_first=compiled_first)
    assert offload.stats().saved_bytes == 0
    names = modules.replace("*", "{0,1}")
    (warning,) = warnings()
    assert f"{names}: {WARNING}" in warning
    assert f"units {names} saved nothing: they lie in a module that torch.compile has compiled" in offload.report()
    offload.detach()


def test_a_wrapper_made_after_attaching_is_not_seen_but_its_units_are_reported(warnings: Any) -> None:
    offload = compare(wrapped, "eager", ["blocks.*"], compiled_first=False)
    assert offload.stats().saved_bytes == 0
    assert warnings() == []
    assert "units blocks.{0,1} saved nothing: they were never called with gradients enabled, or" in offload.report()
    offload.detach()


@pytest.mark.parametrize(
    ("modules", "named"), [("*", False), ("_orig_mod", False), ("*.blocks.*", True), ("*.mlp", True)]
)
def test_a_wrapper_may_be_the_root(modules: str, named: bool, warnings: Any) -> None:
    plain, net = make(), make()
    expected = train(torch.compile(plain, backend="eager"), plain)
    root = torch.compile(net, backend="eager")
    offload = ds_fgoffload.attach(root, {"modules": [modules], "min_tensor_bytes": 0})
    assert_same(train(root, net), expected)
    assert bool(offload.stats().offloaded_bytes) != named
    assert [WARNING in warning for warning in warnings()] == [True] * named
    offload.detach()


@BACKENDS
def test_wrapped_blocks(backend: str, warnings: Any) -> None:
    modules = ["re:blocks\\.\\d+(\\._orig_mod)?"]
    offload = compare(each_block_wrapped, backend, modules, compiled_first=True)
    assert offload.stats().offloaded_bytes == STEPS * BLOCKS * BLOCK_BYTES
    assert warnings() == []
    offload.detach()
    inside = ds_fgoffload.attach(each_block_wrapped(make(), backend), {"modules": ["*.mlp"]})
    assert len(warnings()) == 1
    assert "units blocks.{0,1}._orig_mod.mlp saved nothing: they lie in a module that" in inside.report()
    inside.detach()


def test_an_excluded_module_inside_compiled_code_is_named(warnings: Any) -> None:
    offload = compare(each_block, "eager", ["blocks.*"], compiled_first=False, exclude=["blocks.1.mlp"])
    (warning,) = warnings()
    assert f"blocks.1.mlp: {WARNING}" in warning
    assert offload.stats().offloaded_bytes == STEPS * BLOCKS * BLOCK_BYTES
    offload.detach()


class Broken(Net):
    """Dynamo does not compile what is in ``torch.nn``, and breaks off where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("modules", ["*", "blocks.*", "blocks.*.norm", "blocks.*.norm.*"])
@pytest.mark.parametrize("sequential", [True, False])
def test_what_dynamo_gives_up_on(sequential: bool, modules: str) -> None:
    """Then it goes on with the functions that are called from there. Ours must not be among them."""

    def compile_it(net: nn.Module) -> nn.Module:
        if sequential:
            for block in net.blocks:
                block.norm.compile(backend="eager")
        else:
            net.compile(backend="eager")
        return net

    plain, net = make(Broken), make(Broken)
    expected = train(compile_it(plain), plain)
    without = compilations()
    torch._dynamo.reset()
    counters.clear()
    offload = ds_fgoffload.attach(net, {"modules": [modules], "min_tensor_bytes": 0})
    assert_same(train(compile_it(net), net), expected)
    assert {**compilations(), "graphs": 0} == {**without, "graphs": 0}  # any hook makes Dynamo find more to compile
    offload.detach()


@BACKENDS
def test_backward_twice_through_a_compiled_unit(backend: str) -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    plain, net = (each_block(make(), backend) for _ in range(2))
    offload = ds_fgoffload.attach(net, {"modules": ["blocks.*"], "min_tensor_bytes": 0})
    with torch._functorch.config.patch(donated_buffer=False):  # torch itself refuses otherwise
        assert_same(train(net, net, twice), train(plain, plain, twice))
    assert offload.stats().offloaded_bytes == STEPS * BLOCKS * BLOCK_BYTES
    offload.detach()


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@BACKENDS
@pytest.mark.parametrize("modules", ["*", "blocks.*", "blocks.*.mlp"])
def test_checkpointed_compiled_modules(modules: str, backend: str) -> None:
    offload = compare(each_mlp, backend, [modules], compiled_first=True, of=Checkpointed)
    assert offload.stats().offloaded_bytes > 0
    offload.detach()


def engine_of(net: nn.Module, stage: int, **changes: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **changes,
    }
    return ds_fgoffload.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


@pytest.fixture(scope="module")
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def train_engine(engine: Any) -> list[Tensor]:
    made = []
    for step in range(STEPS):
        loss = engine(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        engine.step()
        made.append(loss.detach())
    return made


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize(
    ("stage", "modules"),
    [
        *[(0, "blocks.*"), (1, "*"), (3, "*")],
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((0, "*"), (1, "blocks.*"))),
    ],
)
def test_a_compiled_engine(stage: int, modules: str, warnings: Any) -> None:
    blocks = 0 if stage == 3 else BLOCKS  # Dynamo takes seconds for ZeRO-3's hooks on each module
    plain = engine_of(make(partial(Net, blocks)), stage)
    plain.compile(backend="eager")
    expected = train_engine(plain)
    plain.destroy()
    torch._dynamo.reset()
    section = {"modules": [modules], "min_tensor_bytes": 0}
    engine = engine_of(make(partial(Net, blocks)), stage, fine_grained_offload=section)
    engine.compile(backend="eager")
    assert_same(train_engine(engine), expected)
    offload = ds_fgoffload.get(engine)
    assert bool(offload.stats().offloaded_bytes) == (modules == "*")
    assert [WARNING in warning for warning in warnings()] == [True] * (modules != "*")
    engine.destroy()


@pytest.mark.usefixtures("_rank")
def test_deepcompile_is_refused() -> None:
    with pytest.raises(OffloadConfigError, match="offload_activation"):
        engine_of(
            make(), 3, compile={"deepcompile": True}, fine_grained_offload={"modules": ["*"], "min_tensor_bytes": 0}
        )
