"""What the offloader counts and carries out: plans, parcels, deaths, and the schedule's acts."""

import pytest
import torch
from torch import nn

from ds_fgoffload.device.streams import SynchronousStreams
from ds_fgoffload.errors import HostPoolError
from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings
from ds_fgoffload.runtime import offloader as offloader_module
from ds_fgoffload.runtime.offloader import Offloader
from ds_fgoffload.saved.eligibility import Eligibility
from ds_fgoffload.saved.saved_tensors import KeptTensor, SavedView
from ds_fgoffload.saved.tensors import checksum
from ds_fgoffload.saved.transfer import Transfer
from ds_fgoffload.schedule.plan import Action, Plan, Site

CPU = torch.device("cpu")
BYTES = 4000  # of one tensor in these tests


class Watched(Transfer):
    """Remembers what it copied, in order."""

    def __init__(self):
        super().__init__(SynchronousStreams(CPU))
        self.log = []

    def offload(self, source, lease, compute, stats):
        self.log.append(f"out {source.numel()}")
        return super().offload(source, lease, compute, stats)

    def reload(self, lease, compute, stats):
        self.log.append(f"in {lease.size_bytes}")
        return super().reload(lease, compute, stats)


class Runtime:
    def __init__(self, *, max_bytes=1 << 20, raise_when_full=False, **plan):
        self.units = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
        self.excluded = {"c": nn.Linear(2, 2)}
        self.transfer = Watched()
        self.pool = HostPool(HostPoolSettings(max_bytes, pin_memory=False), slab_bytes=1 << 12)
        root = nn.ModuleDict({**self.units, **self.excluded})
        plan = Plan(**plan)
        eligibility = Eligibility(root, 100, CPU)
        self.offloader = Offloader(
            self.units, self.excluded, eligibility, plan, self.transfer, self.pool, raise_when_full=raise_when_full
        )
        self.offloader.begin_micro_batch()

    def call(self, unit, *tensors):
        """One call of a unit that saves ``tensors``; returns what autograd would hold."""
        scope = self.offloader.open_scope(unit, (self.units | self.excluded)[unit])
        packed = [self.offloader.pack(scope, tensor) for tensor in tensors]
        self.offloader.close_scope(scope)
        return packed

    def stats(self, unit=None):
        stats = self.offloader.stats()
        return stats if unit is None else stats.units[unit]


def tensor(size_bytes=BYTES):
    return torch.randn(size_bytes // 4)


@pytest.fixture
def alone(monkeypatch):
    """Every storage travels alone."""
    monkeypatch.setattr(offloader_module, "ALONE_BYTES", 0)


def test_small_storages_of_a_call_travel_together_and_large_ones_at_once(monkeypatch):
    monkeypatch.setattr(offloader_module, "ALONE_BYTES", 3000)
    runtime = Runtime()
    scope = runtime.offloader.open_scope("a", runtime.units["a"])
    tensors = [tensor(400), tensor(4000), tensor(1200)]
    packed = [runtime.offloader.pack(scope, t) for t in tensors]
    assert runtime.transfer.log == ["out 4000"]
    runtime.offloader.close_scope(scope)
    assert runtime.transfer.log == ["out 4000", "out 2048"]  # 400 and 1200, each to the next 512
    expected = [t.clone() for t in tensors]
    del tensors
    assert all(torch.equal(runtime.offloader.unpack(p), e) for p, e in zip(packed, expected, strict=True))
    assert runtime.transfer.log[2:] == ["in 2048", "in 4000"]
    stats = runtime.stats("a")
    assert stats.saved_bytes == stats.offloaded_bytes == stats.reloaded_bytes == 5600


def test_a_parcel_is_sent_off_when_it_is_large_enough(monkeypatch):
    monkeypatch.setattr(offloader_module, "PARCEL_BYTES", 2 * BYTES)
    runtime = Runtime()
    runtime.call("a", *(tensor() for _ in range(5)))
    assert runtime.transfer.log == ["out 8192", "out 8192", "out 4000"]


def test_units_do_not_share_parcels():
    runtime = Runtime()
    runtime.call("a", tensor())
    runtime.call("b", tensor())
    assert runtime.transfer.log == ["out 4000", "out 4000"]


@pytest.mark.parametrize("where", ["in the same call", "in a later call", "in another unit"])
def test_a_storage_is_copied_once_wherever_it_is_saved(where, alone):
    runtime = Runtime()
    x = tensor()
    if where == "in the same call":
        first = runtime.call("a", x, x.view(10, 100), x[5:].unflatten(0, (5, 199))[:, 3:])
    else:
        first = runtime.call("a", x)
        second = runtime.call("a" if where == "in a later call" else "b", x.view(10, 100).t())
        first += second
    assert all(packed.storage is first[0].storage for packed in first)
    assert runtime.transfer.log == ["out 4000"]
    assert runtime.stats().saved_bytes == BYTES


def test_a_storage_that_was_changed_is_saved_anew(alone):
    runtime = Runtime()
    x = tensor()
    (old,) = runtime.call("a", x)
    x.add_(1)
    (new,) = runtime.call("a", x)
    assert runtime.stats().saved_bytes == 2 * BYTES
    with pytest.raises(RuntimeError, match="inplace operation"):
        runtime.offloader.unpack(old)
    assert torch.equal(runtime.offloader.unpack(new), x)


def test_a_storage_that_was_overwritten_without_a_word_is_saved_anew_from_then_on(alone, monkeypatch):
    told = []
    monkeypatch.setattr(offloader_module, "warn", told.append)
    runtime = Runtime()
    for number in range(1, 4):
        x = tensor()
        old = runtime.call("a", x)
        x.data.add_(1)  # as a collective does
        (new,) = runtime.call("b", x)
        assert runtime.stats().saved_bytes == number * 2 * BYTES
        assert torch.equal(runtime.offloader.unpack(new), x)
        del old
        runtime.offloader.begin_micro_batch()
    (sentence,) = told
    assert sentence.startswith("fine_grained_offload: b saves a storage that was saved before and overwritten since")


def test_bytes_are_compared_in_the_first_micro_batch_only(alone, monkeypatch):
    sums = []
    monkeypatch.setattr(offloader_module, "checksum", lambda storage: sums.append(storage) or checksum(storage))
    runtime = Runtime()
    x = tensor()
    runtime.call("a", x, x[:2])
    assert len(sums) == 2
    runtime.offloader.begin_micro_batch()
    runtime.call("a", tensor())
    assert len(sums) == 2


@pytest.mark.parametrize(
    "apart", [lambda x: x.unsafe_chunk(2), lambda x: (x[:500], x.data[500:])], ids=["unsafe_chunk", "data"]
)
def test_parts_of_a_storage_that_count_their_changes_apart_are_saved_apart(apart, alone):
    runtime = Runtime()
    first, second = apart(tensor())
    (one,) = runtime.call("a", first)
    second.zero_()
    first_version, second_version = first._version, second._version
    torch._C._autograd._unsafe_set_version_counter((second,), (first_version,))
    assert second_version != first_version
    (other,) = runtime.call("a", second)
    expected = first.clone()
    del first, second
    assert torch.equal(runtime.offloader.unpack(one), expected)
    assert torch.equal(runtime.offloader.unpack(other), torch.zeros(500))


def test_what_is_not_eligible_or_excluded_stays_and_is_counted():
    runtime = Runtime()
    small, parameter = torch.zeros(3), runtime.units["a"].weight
    packed = runtime.call("a", small, parameter)
    assert [type(p) for p in packed] == [KeptTensor, KeptTensor]
    assert runtime.stats("a").skipped == {"too_small": 1, "parameter": 1}
    (kept,) = runtime.call("c", tensor())
    assert type(kept) is KeptTensor
    assert runtime.transfer.log == []
    assert set(runtime.stats().units) == {"a", "b"}


def test_sites_that_the_plan_keeps_stay_where_they_are(alone):
    runtime = Runtime(sites={Site("a", 1, 0): Action.KEEP})
    held = []
    for _ in range(2):
        held += runtime.call("a", tensor(), tensor())
    assert len(runtime.transfer.log) == 3
    assert runtime.stats("a").kept_bytes == BYTES
    assert runtime.stats("a").offloaded_bytes == 3 * BYTES
    runtime.offloader.begin_micro_batch()  # calls are counted anew
    held += runtime.call("a", tensor())
    assert runtime.stats("a").kept_bytes == BYTES
    held += runtime.call("a", tensor())
    assert runtime.stats("a").kept_bytes == 2 * BYTES
    assert all(type(packed) is SavedView for packed in held)
    assert not any(runtime.offloader.unpack(packed).isnan().any() for packed in held)


def test_a_plan_may_keep_everything_but_some():
    runtime = Runtime(default=Action.KEEP, sites={Site("b", 0, 0): Action.OFFLOAD})
    held = runtime.call("a", tensor()) + runtime.call("b", tensor())
    assert runtime.stats("a").kept_bytes == runtime.stats("b").offloaded_bytes == BYTES
    assert len(held) == 2


def test_what_is_needed_now_comes_before_what_is_needed_later(alone):
    runtime = Runtime(prefetch_window_bytes=100_000)
    sizes = [4000, 4400, 4800]
    packed = [runtime.call("a", tensor(size))[0] for size in sizes]
    runtime.transfer.log.clear()
    runtime.offloader.unpack(packed[0])
    assert runtime.transfer.log == ["in 4000", "in 4800", "in 4400"]
    assert runtime.stats().late_reloads == 1
    runtime.offloader.unpack(packed[1])
    runtime.offloader.unpack(packed[2])
    assert runtime.stats().late_reloads == 1
    assert runtime.stats().reloaded_bytes == sum(sizes)


def test_every_byte_that_went_out_is_counted_once_as_what_became_of_it(alone):
    runtime = Runtime(release_window_bytes=BYTES, prefetch_window_bytes=BYTES)
    held = tensor()
    kept, back, dropped, in_place = (runtime.call("a", t)[0] for t in (held, tensor(), tensor(), tensor()))
    for _ in range(3):
        for packed in (in_place, back, kept):
            runtime.offloader.unpack(packed)
    stats = runtime.stats()
    assert (stats.used_in_place_bytes, stats.held_bytes) == (BYTES, BYTES)
    assert stats.reloaded_bytes in (BYTES, 2 * BYTES)  # what was dropped may have come back ahead of its turn
    assert stats.offloaded_bytes == 4 * BYTES
    del kept, back, in_place, packed
    assert runtime.stats().live_host_bytes == BYTES
    del dropped
    assert runtime.stats().live_host_bytes == 0
    assert runtime.pool.stats().leased_bytes == 0


def test_live_host_bytes_are_what_is_leased_now():
    runtime = Runtime()
    packed = runtime.call("a", tensor(), tensor())
    assert runtime.stats().live_host_bytes == 2 * 4096
    assert runtime.pool.stats().leased_bytes == 2 * 4096
    packed.pop()  # the other one still needs the parcel
    assert runtime.stats().live_host_bytes == 2 * 4096
    packed.pop()
    assert runtime.stats().live_host_bytes == runtime.pool.stats().leased_bytes == 0


def test_a_full_pool_is_told_once_and_counted(alone, caplog, monkeypatch):
    told = []
    monkeypatch.setattr(offloader_module.logger, "warning", told.append)
    runtime = Runtime(max_bytes=4096)
    packed = runtime.call("a", *(tensor() for _ in range(3)))
    assert runtime.stats("a").skipped == {"host_full": 2}
    assert (runtime.stats().offloaded_bytes, runtime.stats().kept_bytes) == (BYTES, 2 * BYTES)
    assert len(told) == 1
    assert "the host pool is full" in told[0]
    assert not any(runtime.offloader.unpack(p).isnan().any() for p in packed)


def test_a_full_pool_may_be_an_error(alone):
    runtime = Runtime(max_bytes=4096, raise_when_full=True)
    first = runtime.call("a", tensor())
    with pytest.raises(HostPoolError, match="the host pool is full"):
        runtime.call("a", tensor())
    del first
    assert runtime.stats().live_host_bytes == 0
    runtime.call("a", tensor())


def test_without_memory_to_pack_in_small_storages_stay(monkeypatch):
    runtime = Runtime()

    def nothing_left(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(SynchronousStreams, "allocate", nothing_left)
        tensors = [tensor(), tensor()]
        packed = runtime.call("a", *tensors)
    assert runtime.stats("a").skipped == {"device_full": 1}
    assert runtime.stats("a").kept_bytes == 2 * BYTES
    assert runtime.stats().live_host_bytes == runtime.pool.stats().leased_bytes == 0
    assert all(torch.equal(runtime.offloader.unpack(p), t) for p, t in zip(packed, tensors, strict=True))
    runtime.call("a", tensor())
    assert runtime.stats("a").offloaded_bytes == BYTES


def test_a_snapshot_does_not_change():
    runtime = Runtime()
    before = runtime.stats()
    packed = runtime.call("a", tensor(), torch.zeros(1))
    assert before.units["a"].calls == before.saved_bytes == 0
    assert not before.skipped
    assert runtime.stats().units["a"].calls == len(packed) - 1
