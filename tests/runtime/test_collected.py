"""What a graph holds refers to no object of the user: a module that keeps a tensor of its last forward is collected."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

import ds_fgoffload
from ds_fgoffload.host_memory import pool as pool_module
from ds_fgoffload.host_memory.pool import HostPool

WIDTH = 32


class Router(nn.Module):
    """Keeps a tensor whose graph never runs backward, as a router does its loss and a recurrent module its state."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.last = None

    def forward(self, x):
        y = torch.tanh(self.norm(self.lin(x)))
        self.last = y.square().mean()
        return y


@pytest.fixture(autouse=True)
def _own_pool(monkeypatch):
    monkeypatch.setattr(pool_module, "_POOL", HostPool())


SECTIONS = {
    "offloaded": {"modules": ["0"]},
    "kept": {"modules": ["0"], "exclude": ["0.lin"]},
    "too small": {"modules": ["0"], "min_tensor_bytes": "1GiB"},
    "recomputed": {"recompute": ["0.norm"]},
    "recomputed, its input offloaded": {"recompute": ["0.norm"], "modules": ["0"]},
    "the rest of the model": {"modules": ["1"]},
}


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_module_that_keeps_a_tensor_of_its_last_forward(section, detach):
    model = nn.Sequential(Router(), nn.Linear(WIDTH, 1))
    gone = weakref.ref(model[0])
    attachment = ds_fgoffload.attach(model, {"min_tensor_bytes": 0, **SECTIONS[section]})
    x = torch.randn(8, WIDTH, requires_grad=True)
    model(x).sum().backward()
    model(x)
    if detach:
        attachment.detach()
    del model, attachment, x
    gc.collect()
    assert gone() is None
    assert ds_fgoffload.host_pool().stats().leased_bytes == 0


@pytest.mark.parametrize("section", SECTIONS)
def test_weights_given_by_functional_call(section):
    model = nn.Sequential(Router(), nn.Linear(WIDTH, 1))
    gone = weakref.ref(model[0])
    ds_fgoffload.attach(model, {"min_tensor_bytes": 0, **SECTIONS[section]})
    origin = torch.ones((), requires_grad=True)
    weights = {name: one.detach() * origin for name, one in model.named_parameters()}
    functional_call(model, weights, (torch.randn(8, WIDTH),))
    weak = [weakref.ref(one) for one in weights.values()]
    del model, weights
    gc.collect()
    assert gone() is None
    assert [one() for one in weak] == [None] * len(weak)
    assert ds_fgoffload.host_pool().stats().leased_bytes == 0


def test_a_graph_that_outlives_its_module_says_so():
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))
    ds_fgoffload.attach(model, {"recompute": ["0"], "min_tensor_bytes": 0})
    x = torch.randn(8, WIDTH, requires_grad=True)
    loss = model(x).sum()
    del model
    gc.collect()
    with pytest.raises(ds_fgoffload.OffloadStateError, match="has been deleted or replaced"):
        loss.backward()
