"""A model with offloading attached, given to torch.jit and torch.export."""

import pytest
import torch
from torch import nn

import ds_fgoffload
from ds_fgoffload.host_memory import pool as pool_module
from ds_fgoffload.host_memory.pool import HostPool

SECTIONS = [{"modules": ["0"], "min_tensor_bytes": 0}, {"recompute": ["1"], "min_tensor_bytes": 0}]


@pytest.fixture(autouse=True)
def _own_pool(monkeypatch):
    monkeypatch.setattr(pool_module, "_POOL", HostPool())


@pytest.fixture(params=SECTIONS, ids=["offload", "recompute"])
def model(request):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    ds_fgoffload.attach(model, request.param)
    return model


def test_script_says_to_detach(model):
    with pytest.raises(ds_fgoffload.OffloadStateError, match=r"torch\.jit\.script of .* call .*detach\(\) before"):
        torch.jit.script(model)


def test_trace_says_to_detach(model):
    with pytest.raises(ds_fgoffload.OffloadStateError, match=r"torch\.jit\.trace of .* call .*detach\(\) before"):
        torch.jit.trace(model, torch.randn(4, 8))


def test_export_leaves_the_hooks_out(model):
    x = torch.randn(4, 8)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))
    model(x).sum().backward()


def test_after_detaching_all_work(model):
    ds_fgoffload.get(model).detach()
    x = torch.randn(4, 8)
    assert torch.equal(torch.jit.script(model)(x), model(x))
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))
