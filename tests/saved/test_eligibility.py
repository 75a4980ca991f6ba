"""What autograd saves in real modules, and what is made of it: parameters in all their disguises stay."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_fgoffload.saved.eligibility import Eligibility

CPU = torch.device("cpu")


def saved(root: nn.Module, run: Callable[[], torch.Tensor], unit: nn.Module | None = None) -> list[tuple[Any, ...]]:
    """(shape, reason) of each tensor that ``run`` saves, in order."""
    eligibility = Eligibility(root, 0, CPU)
    seen: list[tuple[Any, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(tensor.shape), eligibility.skip_reason(tensor, unit or root)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run().sum().backward()
    return seen


def activation(*shape: int) -> torch.Tensor:
    """A tensor with a graph, as one module gets it from another."""
    return torch.randn(*shape, requires_grad=True) * 2


def reason(root: nn.Module, tensor: torch.Tensor, min_tensor_bytes: int = 0, device: torch.device = CPU) -> str | None:
    return Eligibility(root, min_tensor_bytes, device).skip_reason(tensor, root)


def test_linear() -> None:
    linear = nn.Linear(8, 6)
    x = activation(4, 8)
    assert saved(linear, lambda: linear(x)) == [((4, 8), None), ((8, 6), "parameter")]


def test_linear_on_a_model_input_without_gradient() -> None:
    linear = nn.Linear(8, 6)
    x = torch.randn(4, 8)
    assert saved(linear, lambda: linear(x)) == [((4, 8), None)]


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8)])
def test_linear_under_autocast(shape: tuple[int, ...]) -> None:
    linear = nn.Linear(8, 6)
    x = activation(*shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = saved(linear, lambda: linear(x))
    assert [why for size, why in found if size == (8, 6)] == ["parameter"]
    assert [why for size, why in found if size != (8, 6)] == [None]


def test_a_leaf_input_is_an_activation_also_when_cast() -> None:
    linear = nn.Linear(8, 6)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert saved(linear, lambda: linear(x)) == [((4, 8), None), ((8, 6), "parameter")]


def test_frozen_linear_under_autocast() -> None:
    linear = nn.Linear(8, 6).requires_grad_(False)
    x = activation(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert saved(linear, lambda: linear(x)) == [((8, 6), "parameter")]


def test_frozen_parameter_of_another_unit_is_not_taken_for_this_ones() -> None:
    root = nn.Sequential(nn.Linear(8, 6).requires_grad_(False), nn.Linear(8, 5))
    eligibility = Eligibility(root, 0, CPU)
    cast = torch.randn(6, 8).bfloat16()
    assert eligibility.skip_reason(cast, root[0]) == "parameter"
    assert eligibility.skip_reason(cast, root[1]) is None


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.randn(6, 8).bfloat16(), "parameter"),
        (torch.randn(8, 6).bfloat16(), "parameter"),
        (torch.randn(6, 8), None),  # no cast: of a frozen parameter in this dtype autograd saves itself
        (torch.randn(8, 8).bfloat16(), None),
        (torch.randn(6, 8).bfloat16().requires_grad_(), None),
        (activation(6, 8).bfloat16(), None),
    ],
)
def test_the_shape_of_a_frozen_parameter(tensor: torch.Tensor, expected: str | None) -> None:
    assert reason(nn.Linear(8, 6).requires_grad_(False), tensor) == expected
    assert reason(nn.Linear(8, 6), tensor) is None


def test_freezing_is_seen_at_refresh() -> None:
    linear = nn.Linear(8, 6)
    eligibility = Eligibility(linear, 0, CPU)
    cast = torch.randn(6, 8).bfloat16()
    assert eligibility.skip_reason(cast, linear) is None
    linear.requires_grad_(False)
    eligibility.refresh()
    assert eligibility.skip_reason(cast, linear) == "parameter"


def test_layer_norm() -> None:
    norm = nn.LayerNorm(8)
    x = activation(4, 8)
    assert sorted(saved(norm, lambda: norm(x)), key=str) == [
        ((4, 1), None),
        ((4, 1), None),
        ((4, 8), None),
        ((8,), "parameter"),
        ((8,), "parameter"),
    ]


def test_batch_norm_in_training_and_its_buffers() -> None:
    norm = nn.BatchNorm1d(8)
    x = activation(4, 8)
    found = saved(norm, lambda: norm(x))
    assert ((4, 8), None) in found
    norm.eval()
    found = saved(norm, lambda: norm(activation(4, 8)))
    assert sorted(why or "" for size, why in found if size == (8,)) == ["buffer", "buffer", "parameter"]


def test_embedding() -> None:
    embedding = nn.Embedding(10, 4)
    index = torch.tensor([[1, 2, 3]])
    assert saved(embedding, lambda: embedding(index)) == [((1, 3), None)]


def test_functional_views_of_a_parameter() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 8, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.weight.unbind(0)
            return (x @ first) * (x @ second)

    expert = Expert()
    x = activation(4, 8)
    found = saved(expert, lambda: expert(x))
    assert [why for size, why in found if size in {(8, 6), (6, 8)}] == ["parameter", "parameter"]
    assert {why for size, why in found if size[0] == 4} == {None}


LINEAR = nn.Linear(8, 6)
W = LINEAR.weight


def _no_grad_view() -> torch.Tensor:
    with torch.no_grad():
        return W.t()


@pytest.mark.parametrize(
    "tensor",
    [
        W,
        W.t(),
        W.detach(),
        W.detach().t(),
        W.data,
        W[1:],
        W.view(8, 6),
        W.expand(3, 6, 8),
        W.t().unsqueeze(0).permute(2, 0, 1),
        _no_grad_view(),
        W.to(torch.bfloat16),
        W.to(torch.bfloat16).t(),
        W.to(torch.bfloat16).view(2, 3, 8).transpose(0, 1)[1:],
        W.to(torch.bfloat16).split(2)[0],
    ],
    ids=range(14),
)
def test_disguises_of_a_parameter(tensor: torch.Tensor) -> None:
    assert reason(LINEAR, tensor) == "parameter"


@pytest.mark.parametrize(
    "tensor",
    [
        W * 1,
        W.clone(),
        (W * 1).t(),
        W.to(torch.bfloat16).t() * 1,
        torch.randn(6, 8),
        torch.randn(6, 8, requires_grad=True).to(torch.bfloat16).t(),
    ],
    ids=range(6),
)
def test_what_is_computed_from_a_parameter_is_none(tensor: torch.Tensor) -> None:
    assert reason(LINEAR, tensor) is None


def test_a_long_chain_of_views_of_an_activation_is_an_activation() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    view = x.to(torch.bfloat16)
    for _ in range(50):
        view = view.t()
    assert reason(LINEAR, view) is None


def test_zero_1_and_2_keep_all_parameters_in_one_flat_storage() -> None:
    root = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    flat = torch.zeros(1000)
    offset = 0
    for parameter in root.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    x = activation(1000)
    assert x.untyped_storage().nbytes() == flat.untyped_storage().nbytes()
    eligibility = Eligibility(root, 0, CPU)
    assert eligibility.skip_reason(x, root) is None
    assert eligibility.skip_reason(flat[-1:], root) == "parameter"
    assert eligibility.skip_reason(root[1].weight.detach().t(), root[0]) == "parameter"


class Zero3:
    """Gathers and partitions the parameters of a module as ZeRO-3 does: by swapping ``param.data``."""

    def __init__(self, module: nn.Module) -> None:
        self.full = {}
        for number, parameter in enumerate(module.parameters()):
            parameter.ds_id = number
            parameter.ds_status = "NOT_AVAILABLE"
            parameter.ds_shape = parameter.shape
            self.full[parameter] = parameter.data.clone()
            parameter.data = torch.empty(0)
        for leaf in module.modules():
            if not list(leaf.children()):
                leaf.register_forward_pre_hook(lambda leaf, _: self.gather(leaf))
                leaf.register_forward_hook(lambda leaf, *_: self.partition(leaf))

    def gather(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data = self.full[parameter].clone()
            parameter.ds_status = "AVAILABLE"

    def partition(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data = torch.empty(0)
            parameter.ds_status = "NOT_AVAILABLE"


class Disguised(nn.Module):
    """Saves its weight as a view, and as a detached tensor that only its memory gives away."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + F.linear(x, self.weight.detach())


def test_zero_3() -> None:
    root = nn.Sequential(nn.Linear(8, 8), Disguised())
    Zero3(root)
    eligibility = Eligibility(root, 0, CPU)
    seen: list[tuple[Any, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(tensor.shape), eligibility.skip_reason(tensor, root)))
        return tensor

    for _ in range(2):
        seen.clear()
        eligibility.refresh()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            root(activation(4, 8))
        assert sorted(seen, key=str) == [
            ((4, 8), None),
            ((4, 8), None),
            ((8, 6), "parameter"),
            ((8, 6), "parameter"),
            ((8, 8), "parameter"),
        ]


def test_views_of_a_zero_3_parameter_that_was_gathered_again_since() -> None:
    root = Disguised()
    zero = Zero3(root)
    zero.gather(root)
    with torch.no_grad():
        unlinked = root.weight.t()
    linked = root.weight.diagonal()
    zero.partition(root)
    zero.gather(root)
    assert [reason(root, tensor) for tensor in (unlinked, linked, linked * 1)] == ["parameter", "parameter", None]


def test_frozen_zero_3_parameter_cast_by_autocast() -> None:
    root = nn.Linear(8, 6).requires_grad_(False)
    zero = Zero3(root)
    eligibility = Eligibility(root, 0, CPU)
    cast = torch.randn(8, 6).bfloat16()
    assert eligibility.skip_reason(cast, root) == "parameter"
    zero.gather(root)
    assert eligibility.skip_reason(cast, root) == "parameter"


def test_memory_that_was_a_parameters_is_an_activations_now() -> None:
    """A storage freed by ``param.data =`` may be given out at the same address: it is no parameter there."""
    linear = nn.Linear(64, 64, bias=False)
    eligibility = Eligibility(linear, 0, CPU)
    stale = linear.weight.untyped_storage()._cdata
    held: list[torch.Tensor] = []  # what was given out stays, so that the address comes back in the end
    linear.weight.data = torch.randn(64, 64)
    gc.collect()
    for _ in range(200):
        held += [torch.randn(64, 64) for _ in range(50)]
        reused = [t for t in held[-50:] if t.untyped_storage()._cdata == stale]
        if reused:
            assert eligibility.skip_reason(reused[0], linear) is None
            return
    pytest.fail("the allocator never gave the address out again: this test tests nothing")


def test_a_new_parameter_is_known_after_refresh() -> None:
    root = nn.Sequential(nn.Linear(8, 6))
    eligibility = Eligibility(root, 0, CPU)
    root.append(nn.Linear(6, 4))
    detached = root[1].weight.detach()
    assert eligibility.skip_reason(detached, root) is None
    eligibility.refresh()
    assert eligibility.skip_reason(detached, root) == "parameter"


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (activation(4), "too_small"),
        (activation(256), None),
        (activation(255), "too_small"),
        (activation(1000)[:1], None),  # the storage counts, not the view
        (activation(1).expand(1000), "too_small"),
        (torch.empty(0), "empty"),
        (activation(1000)[:0], "empty"),
        (torch.empty(1000, device="meta"), "other_device"),
        (torch.eye(100).to_sparse(), "not_strided"),
        (torch.randn(1000, dtype=torch.complex64).conj(), "not_strided"),
        (torch.randn(1000, dtype=torch.complex64).conj().imag, "not_strided"),
        (torch.randn(1000).as_subclass(Odd), "subclass"),
        (nn.Parameter(torch.randn(1)), "parameter"),
        (torch.arange(1000), None),
        (torch.rand(2000) > 0.5, None),
    ],
    ids=range(15),
)
def test_size_place_and_kind(tensor: torch.Tensor, expected: str | None) -> None:
    assert reason(nn.Linear(3, 3), tensor, min_tensor_bytes=1024) == expected


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantized() -> None:
    tensor = torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8)
    assert reason(LINEAR, tensor) == "not_strided"


def test_a_storage_that_was_emptied() -> None:
    tensor = torch.randn(8)
    tensor.untyped_storage().resize_(0)
    assert reason(LINEAR, tensor) == "empty"


def test_the_wrappers_of_torch_func_are_left_alone() -> None:
    found = []
    torch.func.vmap(lambda x: (found.append(reason(LINEAR, x)), x)[1])(torch.randn(3, 8))
    assert found == ["not_strided"]


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", None), ("cpu:0", None), ("cuda", "other_device"), ("cuda:0", "other_device"), ("meta", "other_device")],
)
def test_the_device_may_lack_an_index(device: str, expected: str | None) -> None:
    assert reason(LINEAR, torch.randn(8), device=torch.device(device)) == expected


def test_a_model_of_subclass_and_meta_parameters_can_be_read() -> None:
    root = nn.Module()
    root.odd = nn.Parameter(torch.randn(4).as_subclass(Odd))
    root.meta = nn.Parameter(torch.empty(4, device="meta"))
    root.lazy = nn.UninitializedParameter()
    root.register_buffer("sparse", torch.eye(3).to_sparse())
    assert reason(root, torch.randn(4)) is None


def test_the_cost_for_a_normal_activation() -> None:
    root = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    eligibility = Eligibility(root, 0, CPU)
    x = activation(64, 64)
    rounds = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            eligibility.skip_reason(x, root)
        rounds.append((time.perf_counter() - start) / 1000)
    assert statistics.quantiles(rounds, n=10)[0] < 10e-6  # about 1 us; a walk over the parameters takes 30 us and more
