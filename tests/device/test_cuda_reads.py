"""What torch is asked to tell of blocking reads, and what becomes of the user's own warnings meanwhile."""

import warnings

import pytest
import torch

from ds_fgoffload.device.cuda_reads import CudaReads

READ = "called a synchronizing CUDA operation (Triggered internally at somewhere)"


@pytest.fixture
def mode(monkeypatch):
    """torch's mode, without a device."""
    modes = {"default": 0, "warn": 1, "error": 2}
    state = {"mode": 0}
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state["mode"])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda name: state.update(mode=modes[name]))
    return state


def nobody():
    raise AssertionError


def test_reads_are_told_while_they_are_watched_and_not_shown(mode):
    reads, told = CudaReads(), []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for watch in (True, False):
            reads.watch("me", (lambda: told.append(1)) if watch else None)
            assert mode["mode"] == int(watch)
            for _ in range(2):  # a second warning from one line is one, too
                warnings.warn(READ, stacklevel=1)
            warnings.warn("mine", stacklevel=1)
    assert len(told) == 2
    assert sum("mine" in str(warning.message) for warning in shown) == 2


def test_the_filters_are_left_as_they_were(mode):
    reads = CudaReads()
    filters, show = list(warnings.filters), warnings.showwarning
    for watcher in ("one", "other"):
        reads.watch(watcher, nobody)
    reads.watch("one", None)
    assert mode["mode"] == 1
    reads.watch("other", None)
    assert (list(warnings.filters), warnings.showwarning, mode["mode"]) == (filters, show, 0)


def test_a_mode_that_the_user_has_set_stays(mode):
    mode["mode"] = 2
    reads = CudaReads()
    reads.watch("me", nobody)
    reads.watch("me", None)
    assert mode["mode"] == 2
