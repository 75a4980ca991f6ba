"""How much work the saved tensors are for Python's collector."""

import gc

import pytest
import torch
from torch import nn

import ds_fgoffload
from ds_fgoffload import pool as pool_module
from ds_fgoffload.pool import HostPool

UNITS = 32


@pytest.fixture(autouse=True)
def _own_pool(monkeypatch):
    monkeypatch.setattr(pool_module, "_POOL", HostPool())


class Unit(nn.Module):
    """Saves one storage that no other unit saves; under ``recompute`` its input, and its output is promised."""

    def forward(self, x):
        return x.exp().sin()


def tracked_objects_at_the_end_of_forward(section, steps=4):
    """Net, since the forward's begin: what the collector goes through while it waits for backward."""
    model = nn.Sequential(*(Unit() for _ in range(UNITS)))
    attachment = ds_fgoffload.attach(model, section) if section else None
    x = torch.randn(64, 64, requires_grad=True)
    for _ in range(steps):
        gc.collect()
        before = len(gc.get_objects())
        loss = model(x).sum()
        after = len(gc.get_objects())
        loss.backward()
    if attachment is not None:
        counted = attachment.stats().recomputations if "recompute" in section else attachment.stats().offloaded_bytes
        assert counted > 0
        attachment.detach()
    return after - before


@pytest.mark.parametrize(
    ("section", "most"),
    [({"modules": ["*"], "policy": "all", "min_tensor_bytes": 0}, 7), ({"modules": [], "recompute": ["*"]}, 6)],
    ids=["offloaded", "recomputed"],
)
def test_few_objects_wait_for_backward(section, most):
    """A unit here has two saved tensors. Python collects when enough objects are alive, which takes long at times."""
    more = tracked_objects_at_the_end_of_forward(section) - tracked_objects_at_the_end_of_forward(None)
    assert 0 < more / UNITS <= most
