"""How much work the saved tensors are for Python's collector."""

import gc
import sys
import threading

import pytest
import torch
from torch import nn

import ds_fgoffload
from ds_fgoffload.host_memory import pool as pool_module
from ds_fgoffload.host_memory.pool import HostPool

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


class Trains:
    """A cycle; when it is collected, a thread runs a forward, and is waited for."""

    def __init__(self, step):
        self.itself, self.step, self.thread = self, step, None

    def __del__(self):
        self.thread = threading.Thread(target=self.step, daemon=True)
        self.thread.start()
        self.thread.join(10)
        ended.append(not self.thread.is_alive())


ended = []


def test_what_is_collected_may_wait_for_a_thread_that_trains():
    model = nn.Sequential(*(Unit() for _ in range(4)))
    attachment = ds_fgoffload.attach(model, {"modules": ["*"], "policy": "all", "min_tensor_bytes": 0})
    x = torch.randn(64, 64, requires_grad=True)
    model(x).sum().backward()
    ended.clear()
    Trains(lambda: model(x).sum().backward())
    model(x).sum().backward()
    gc.collect()
    attachment.detach()
    assert ended == [True]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="garbage is collected bit by bit")
def test_what_waits_for_backward_does_not_grow_old():
    """What lives when the second generation is collected is old, and when much is, Python collects everything."""
    model = nn.Sequential(*(Unit() for _ in range(8 * UNITS)))
    attachment = ds_fgoffload.attach(model, {"modules": ["*"], "policy": "all", "min_tensor_bytes": 0})
    x = torch.randn(64, 64, requires_grad=True)
    waiting, in_the_middle = [], []

    def collected(phase, info):
        if phase == "start" and info["generation"] == 1 and waiting:
            in_the_middle.append(info)

    for _ in range(3):
        model(x).sum().backward()
    model[0].register_forward_pre_hook(lambda *_: waiting.append(True))
    gc.collect()
    gc.callbacks.append(collected)
    try:
        for _ in range(20):
            loss = model(x).sum()
            loss.backward()
            waiting.clear()
    finally:
        gc.callbacks.remove(collected)
    attachment.detach()
    assert in_the_middle == []
