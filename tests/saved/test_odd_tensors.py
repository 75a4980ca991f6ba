"""Tensors that are no plain memory: they stay where they are, counted by their reason, and nothing raises."""

import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ds_fgoffload
from ds_fgoffload.host_memory import pool as pool_module
from ds_fgoffload.host_memory.pool import HostPool
from ds_fgoffload.saved.tensors import is_plain

WIDTH = 8


@pytest.fixture(autouse=True)
def _own_pool(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(pool_module, "_POOL", HostPool())


def quantized():
    return torch.quantize_per_tensor(torch.randn(4, WIDTH), 0.1, 0, torch.quint8)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the prototype of strided nested tensors
        return torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)])


ODD = {
    "nested": nested,
    "sparse": lambda: torch.randn(4, WIDTH).to_sparse(),
    "sparse csr": lambda: torch.randn(4, WIDTH).to_sparse_csr(),
    "quantized": quantized,
    "meta": lambda: torch.empty(4, WIDTH, device="meta"),
    "fake": lambda: FakeTensorMode().from_tensor(torch.randn(4, WIDTH)),
    "conjugated": lambda: torch.randn(4, WIDTH, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", ODD)
def test_they_are_not_plain(kind):
    assert not is_plain(ODD[kind]())


def test_wrappers_of_torch_func_are_not_plain():
    seen = []
    torch.vmap(lambda x: seen.append(is_plain(x)) or x * 2)(torch.randn(3, 4))
    torch.func.grad(lambda x: seen.append(is_plain(x)) or x.sum())(torch.randn(3))
    assert seen == [False, False]
    assert is_plain(torch.randn(3))


class Saves(torch.autograd.Function):
    """Saves an odd tensor beside a plain one."""

    @staticmethod
    def forward(ctx, x, odd):
        ctx.save_for_backward(x, odd)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        x, odd = ctx.saved_tensors
        assert type(odd).__name__ in {"Tensor", "FakeTensor"}
        return gradient * 2 + 0 * x, None


class Unit(nn.Module):
    def __init__(self, odd):
        super().__init__()
        self.lin, self.odd = nn.Linear(WIDTH, WIDTH), [odd]

    def forward(self, x):
        return torch.tanh(Saves.apply(self.lin(x), self.odd[0]))


@pytest.mark.parametrize("section", [{"modules": ["0"]}, {"recompute": ["0"]}], ids=["offload", "recompute"])
@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "nested"])  # torch takes none in a Function
def test_a_function_that_saves_one(kind, section):
    odd, gradients = ODD[kind](), []
    weight = torch.randn(WIDTH, WIDTH)
    for attached in (False, True):
        model = nn.Sequential(Unit(odd), nn.Linear(WIDTH, 1))
        with torch.no_grad():
            model[0].lin.weight.copy_(weight)
            model[0].lin.bias.zero_()
            model[1].weight.fill_(0.5)
        attachment = ds_fgoffload.attach(model, {"min_tensor_bytes": 0, **section}) if attached else None
        model(torch.ones(4, WIDTH)).sum().backward()
        gradients.append(model[0].lin.weight.grad)
        if attachment is not None:
            stats = attachment.stats()
            assert stats.offloaded_bytes > 0 or "recompute" in section
            assert stats.live_host_bytes == 0
            attachment.detach()
    assert torch.equal(*gradients)


@pytest.mark.parametrize("section", [{"modules": ["*"]}, {"recompute": ["0"]}], ids=["offload", "recompute"])
def test_nested_tensors_through_layers(section):
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), nested()
    plain = deepcopy(model)
    attachment = ds_fgoffload.attach(model, {"min_tensor_bytes": 0, **section})
    for one in (plain, model):
        torch.nested.to_padded_tensor(one(x), 0.0).sum().backward()
    assert torch.equal(plain[0].weight.grad, model[0].weight.grad)
    units = attachment.stats().units
    assert ("modules" in section) == (sum(unit.skipped["not_strided"] for unit in units.values()) > 0)
    assert "modules" in section or "not a plain strided tensor" in units["0"].recompute_refused
    attachment.detach()


class Looks(torch.autograd.Function):
    """Looks in backward at what it hung on a saved tensor, as fused weight gradients look at ``main_grad``."""

    found: list = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        saved = x * 1
        saved.tag = "here"
        ctx.save_for_backward(saved)
        return saved.clone()

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        Looks.found.append(getattr(saved, "tag", None))
        return gradient


def test_attributes_of_what_travels_are_a_limit():
    """docs/limits.md: autograd itself hands back an intermediate tensor as a new object, too."""
    Looks.found = []

    class Tags(nn.Module):
        def forward(self, x):
            return Looks.apply(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Tags())
    plain = deepcopy(model)
    attachment = ds_fgoffload.attach(model, {"modules": ["1"], "min_tensor_bytes": 0})
    for one in (plain, model):
        one(torch.ones(4, WIDTH)).sum().backward()
    assert Looks.found == ["here", None]
    assert torch.equal(plain[0].weight.grad, model[0].weight.grad)
    attachment.detach()
