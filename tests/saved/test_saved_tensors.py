"""A saved storage, alone or packed with others, gives back its bits whatever is done with it, and ends cleanly."""

import gc
import weakref
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from ds_fgoffload.device.streams import SynchronousStreams
from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings
from ds_fgoffload.saved.saved_tensors import KeptTensor, SavedStorage
from ds_fgoffload.saved.tensors import Layout
from ds_fgoffload.saved.transfer import Death, Parcel, ParcelState, Transfer
from ds_fgoffload.stats import UnitStats
from tests.helpers.adversary import AdversarialStreams

CPU = torch.device("cpu")
CHANGED = r"has been modified by an inplace operation: .* is at version 1; expected version 0 instead"


class Saved:
    """Storages in one parcel, with the pool and streams that they travel on; ``originals`` as the user holds them."""

    def __init__(self, originals, streams=None):
        self.streams = streams or SynchronousStreams(CPU)
        self.pool = HostPool(HostPoolSettings(1 << 20, pin_memory=False), slab_bytes=1 << 12)
        self.deaths = deque()
        transfer = Transfer(self.streams)
        self.originals = originals
        self.expected = [t.clone() for t in originals]
        self.layouts = [Layout.of(t) for t in originals]
        self.storages = [SavedStorage(t, transfer.compute()) for t in originals]
        aliases = [storage.alias for storage in self.storages]
        first = self.storages[0]
        self.parcel = Parcel(7, aliases, UnitStats(), transfer, first.compute, self.deaths, first.original)

    def offload(self):
        if self.parcel.state is ParcelState.RESIDENT:
            self.parcel.offload(self.pool.lease(self.parcel.size_bytes))
            for storage, offset in zip(self.storages, self.parcel.offsets, strict=True):
                storage.send_with(self.parcel, offset)

    def release(self):
        self.parcel.release()

    def reload(self):
        self.parcel.reload()

    def let_go(self):
        """The user holds the originals no longer."""
        self.originals = None

    def view(self, index=0):
        return self.storages[index].view(self.layouts[index])

    def drop(self):
        self.originals = self.storages = self.parcel = None

    def do(self, *steps):
        for step in steps:
            getattr(self, step)()
        return self

    @property
    def leased_bytes(self):
        return self.pool.stats().leased_bytes


def alone(streams=None):
    return Saved([torch.randn(6, 8).t()], streams)


def packed(streams=None):
    mask = (torch.randn(3, 50) > 0).to(torch.uint8)
    tensors = [
        torch.randn(40),
        mask,
        torch.randn(5, 6).to(torch.bfloat16)[1:],
        torch.arange(9).view(3, 3).t(),
        mask.bool(),
    ]
    return Saved(tensors, streams)


BOTH = pytest.mark.parametrize("make", [alone, packed])

# Steps that lead to each state, with the originals gone, as is usual.
WAYS = {
    ParcelState.RESIDENT: (),
    ParcelState.COPYING_OUT: ("let_go", "offload"),
    ParcelState.ON_HOST: ("let_go", "offload", "release"),
    ParcelState.RELOADED: ("let_go", "offload", "release", "reload"),
}
IN_EACH_STATE = pytest.mark.parametrize("state", list(WAYS), ids=lambda state: state.name)


@BOTH
@IN_EACH_STATE
def test_the_same_tensor_comes_back_from_every_state(make, state):
    saved = make().do(*WAYS[state])
    assert saved.parcel.state is state
    for _ in range(2):
        for index, (expected, layout) in enumerate(zip(saved.expected, saved.layouts, strict=True)):
            found = saved.view(index)
            assert torch.equal(found, expected)
            assert Layout.of(found)[:3] == layout[:3]
            assert not found.requires_grad


@BOTH
@IN_EACH_STATE
@pytest.mark.parametrize("step", ["release", "reload"])
def test_a_step_that_does_not_start_here_does_nothing(make, state, step):
    legal = {"release": ParcelState.COPYING_OUT, "reload": ParcelState.ON_HOST}
    leads_to = {"release": ParcelState.ON_HOST, "reload": ParcelState.RELOADED}
    saved = make().do(*WAYS[state], step)
    assert saved.parcel.state is (leads_to[step] if state is legal[step] else state)
    assert torch.equal(saved.view(), saved.expected[0])


@BOTH
def test_device_memory_is_free_once_released_and_not_before(make):
    saved = make()
    original = weakref.ref(saved.originals[0].untyped_storage())
    pointer = saved.originals[0].data_ptr()
    saved.do("let_go", "offload")
    held = saved.parcel._memory
    if make is alone:
        assert held.data_ptr() == pointer
    memory = weakref.ref(held)
    del held
    saved.release()
    assert memory() is None or memory().untyped_storage().nbytes() == 0
    assert original() is None
    assert all(storage.alias.untyped_storage().nbytes() == 0 for storage in saved.storages)


def test_a_storage_that_is_still_held_elsewhere_needs_no_copy_back():
    saved = alone().do("offload", "release")
    assert not saved.parcel.reload()
    assert saved.view().data_ptr() == saved.originals[0].data_ptr()


def test_a_storage_that_was_emptied_meanwhile_comes_back_from_the_host():
    saved = alone().do("offload", "release")
    saved.originals[0].untyped_storage().resize_(0)  # as FSDP does; it is no change that autograd counts
    assert saved.parcel.reload()
    assert torch.equal(saved.view(), saved.expected[0])


STEPS = ["offload", "release", "reload", "view", "view", "let_go", "keep_view", "drop_views"]


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    make=st.sampled_from([alone, packed]),
    seed=st.none() | st.integers(0, 1 << 16),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 4)), max_size=25),
)
def test_the_schedule_is_advice(make, seed, steps):
    streams = None if seed is None else AdversarialStreams(seed)
    saved = make(streams)
    views = []
    for step, index in steps:
        if step in ("view", "keep_view"):
            index %= len(saved.storages)  # noqa: PLW2901 - fewer when alone
            found = saved.view(index)
            assert torch.equal(found, saved.expected[index])
            views += [(found, index)] * (step == "keep_view")
        elif step == "drop_views":
            views.clear()
        else:
            saved.do(step)
    assert all(torch.equal(view, saved.expected[index]) for view, index in views)
    saved.drop()
    assert saved.leased_bytes == 0
    assert all(torch.equal(view, saved.expected[index]) for view, index in views)
    if streams is not None:
        streams.drain()
        assert streams.faults == []


@BOTH
@pytest.mark.parametrize(
    ("steps", "fences"),
    [
        ((), None),
        (("offload",), ["d2h"]),
        (("let_go", "offload", "view"), ["d2h"]),
        (("let_go", "offload", "release"), ["d2h"]),
        (("let_go", "offload", "release", "reload"), ["d2h", "h2d"]),
        (("let_go", "offload", "release", "reload", "view"), ["d2h", "h2d"]),
        (("let_go", "offload", "release", "view"), ["d2h", "h2d"]),
    ],
)
def test_death_gives_the_block_back_with_its_last_uses(make, steps, fences):
    streams = AdversarialStreams(seed=0)
    saved = make(streams).do(*steps)
    size_bytes = saved.parcel.size_bytes
    assert saved.leased_bytes == (0 if fences is None else -(-size_bytes // 512) * 512)
    saved.drop()
    assert list(saved.deaths) == [Death(7, 0 if fences is None else size_bytes)]
    assert saved.leased_bytes == 0
    assert sorted(fence.stream for fence in saved.pool.lease(size_bytes).fences) == (fences or [])
    streams.drain()
    assert streams.faults == []


@BOTH
def test_the_last_view_owns_the_memory_and_nothing_else_does(make):
    saved = make().do(*WAYS[ParcelState.RELOADED])
    view = saved.view()
    gc.disable()
    try:
        del saved.storages[1:]
        saved.parcel = None
        assert not saved.deaths
        saved.drop()
        assert len(saved.deaths) == 1
    finally:
        gc.enable()
    assert torch.equal(view, saved.expected[0])


@BOTH
@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("views", [(), ("view",)], ids=["never used", "used before"])
def test_a_change_of_the_original_is_refused(make, before, views):
    steps = ["offload", "release", "reload", *views]
    saved = make().do(*steps[:before])
    saved.originals[0].add_(1)
    for step in ["nothing", *steps[before:]]:
        if step not in ("nothing", "view"):
            saved.do(step)
        with pytest.raises(RuntimeError, match=CHANGED):
            saved.view()


@BOTH
@pytest.mark.parametrize(
    "state", [ParcelState.RESIDENT, ParcelState.COPYING_OUT, ParcelState.RELOADED], ids=lambda state: state.name
)
def test_a_change_of_what_was_given_back_is_refused_ever_after(make, state):
    saved = make().do(*WAYS[state])
    saved.view().mul_(2)
    for step in ("offload", "release", "reload"):
        with pytest.raises(RuntimeError, match=CHANGED):
            saved.view()
        saved.do(step)
    with pytest.raises(RuntimeError, match=CHANGED):
        saved.view()


def test_a_change_of_one_storage_is_none_of_its_neighbours_in_the_parcel():
    saved = packed().do(*WAYS[ParcelState.RELOADED])
    saved.view(0).mul_(2)
    for index in range(1, 5):
        assert torch.equal(saved.view(index), saved.expected[index])


def test_a_storage_covers_what_is_still_as_it_was_saved():
    tensor = torch.zeros(8)
    storage = SavedStorage(tensor, None)
    assert storage.covers(tensor)
    assert storage.covers(tensor[2:5])
    tensor[7] = 1
    assert not storage.covers(tensor)
    assert not storage.covers(tensor[2:5])
    assert SavedStorage(tensor, None).covers(tensor)


# What stays on the device.


def test_a_kept_tensor_is_returned_with_its_bits_and_without_its_graph():
    tensor = torch.randn(3, requires_grad=True) * 2
    kept = KeptTensor(tensor).tensor()
    assert torch.equal(kept, tensor)
    assert kept.grad_fn is None
    assert kept.data_ptr() == tensor.data_ptr()


def test_a_parameter_is_returned_itself():
    parameter = nn.Parameter(torch.randn(3))
    assert KeptTensor(parameter).tensor() is parameter


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(3), lambda: nn.Parameter(torch.zeros(3)), lambda: nn.Parameter(torch.zeros(3, 2)).t()]
)
def test_a_change_of_a_kept_tensor_is_refused(make):
    tensor = make()
    kept = KeptTensor(tensor)
    kept.tensor()
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        kept.tensor()
