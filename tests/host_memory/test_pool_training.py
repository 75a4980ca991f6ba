"""Training goes on, to the same bits, whatever the host's memory does; and nothing of it is left afterwards."""

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from deepspeed.utils import logger
from torch import nn

import ds_fgoffload
from ds_fgoffload.host_memory import budget as budget_module
from ds_fgoffload.host_memory import pool as pool_module
from ds_fgoffload.host_memory import slabs as region_module
from ds_fgoffload.host_memory import slabs as supply_module
from ds_fgoffload.host_memory.budget import Room
from ds_fgoffload.host_memory.node_ledger import DIRECTORY_VARIABLE, Ledger, read_node
from ds_fgoffload.host_memory.pool import HostPool
from ds_fgoffload.runtime import offloader as offloader_module

MIB = 1 << 20
SECTION = {"modules": ["*"], "min_tensor_bytes": 0}


@pytest.fixture
def pool(monkeypatch, tmp_path):
    """A small pool that grows by single pages, so that it asks the system more than fifty times."""
    pool = HostPool(ledger=Ledger(tmp_path / "ledger"), slab_bytes=4096, background=False)
    monkeypatch.setattr(pool_module, "_POOL", pool)
    monkeypatch.setattr(offloader_module, "ALONE_BYTES", 0)
    yield pool
    assert (pool.stats().leased_bytes, pool.stats().pinned_bytes) == (0, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def warnings(monkeypatch):
    told = []
    monkeypatch.setattr(logger, "warning", lambda message, *_: told.append(message))
    return told


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(26) for layer in (nn.Linear(64, 64), nn.GELU())])


def train(model, section=None):
    """The loss and the gradients."""
    model = deepcopy(model)
    attachment = None if section is None else ds_fgoffload.attach(model, section)
    loss = model(torch.randn(32, 64, generator=torch.Generator().manual_seed(1))).square().mean()
    loss.backward()
    found = [loss.detach(), *[parameter.grad.clone() for parameter in model.parameters()]]
    del loss
    if attachment is not None:
        attachment.detach()
    return found


@pytest.fixture(scope="module")
def expected(model):
    return train(model)


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("choice", "forever"), [("pageable", False), ("pageable", True), ("keep", True)])
def test_a_pin_that_fails_at_any_of_the_first_fifty_changes_no_bit(
    monkeypatch, pool, warnings, model, expected, choice, forever
):
    section = {**SECTION, "host_pool": {"on_pin_failure": choice}}
    monkeypatch.setattr(supply_module, "RETRY_AFTER_S", 0.0)
    monkeypatch.setattr(budget_module, "room", lambda: Room(1 << 30, 1 << 30, "the system"))
    for k in range(1, 51):
        calls = 0

        def register(address, size_bytes, k=k):
            nonlocal calls
            calls += 1
            if calls == k or (forever and calls > k):
                raise RuntimeError("CUDA error: out of memory (2)")
            return True

        monkeypatch.setattr(region_module, "register_host", register)
        pool._slab_source._warned_of_pin_failure = False
        warnings.clear()
        assert same(train(model, section), expected)
        assert calls >= k
        assert "refused to page-lock" in warnings[0]
        assert "CUDA error: out of memory (2)" in warnings[0]
        assert pool.stats().pinned_bytes == 0


def test_under_a_limit_of_a_few_pages_training_goes_on_and_says_what_was_short(
    monkeypatch, pool, warnings, model, expected
):
    taken = pool._slab_source

    def room():
        return Room(64 * 4096 - taken.held_bytes, 64 * 4096, "the cgroup")

    monkeypatch.setattr(budget_module, "room", room)
    assert same(train(model, {**SECTION, "host_pool": {"max_bytes": "1GiB"}}), expected)
    (warning,) = warnings
    for part in ("the host pool is full", "left to the cgroup", "raise the memory limit", "stay on the device"):
        assert part in warning


def test_every_engine_has_its_account_and_its_quota(pool, warnings, model, expected):
    actor, critic = deepcopy(model), deepcopy(model)
    first = ds_fgoffload.attach(actor, SECTION)
    second = ds_fgoffload.attach(critic, {**SECTION, "host_pool": {"quota_bytes": 16384}})
    x = torch.randn(32, 64)
    losses = [actor(x).sum(), critic(x).sum()]
    engines = pool.stats().engines
    assert list(engines) == ["Sequential", "Sequential 2"]
    assert engines["Sequential"].leased_bytes == 52 * 8192
    assert 0 < engines["Sequential 2"].leased_bytes <= 16384
    assert "host_pool.quota_bytes" in warnings[0]
    for loss in losses:
        loss.backward()
    del losses, loss
    first.detach()
    second.detach()


SCRIPT = """
import sys, torch, ds_fgoffload
from ds_fgoffload.host_memory.node_ledger import read_node
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
ds_fgoffload.attach(model, {"modules": ["*"], "min_tensor_bytes": 0})
loss = model(torch.randn(512, 64)).sum()
print(len(read_node()), ds_fgoffload.host_pool().stats().leased_bytes)
if sys.argv[1] == "raises":
    raise KeyError("what a user does")
"""


@pytest.mark.parametrize("end", ["alive", "raises"])
def test_the_end_of_the_interpreter_leaves_no_file(tmp_path, end):
    environment = {**os.environ, DIRECTORY_VARIABLE: str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, end], capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    assert done.returncode == (0 if end == "alive" else 1), done.stderr
    assert ("what a user does" in done.stderr) == (end == "raises")
    assert done.stdout.splitlines()[-1] == f"1 {2 * 512 * 64 * 4}"
    assert list(tmp_path.iterdir()) == []
    assert read_node(Path(tmp_path, "none")) == []
