"""The host pool: what is lent, what follows a block to its next user, and what happens at the limits."""

import weakref

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_fgoffload import pool as pool_module
from ds_fgoffload.errors import OffloadConfigError, OffloadStateError
from ds_fgoffload.pool import HostPool, HostPoolSettings, host_pool
from ds_fgoffload.streams import Fence, make_streams

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class System:
    """Hands out slabs up to ``largest`` bytes, and remembers what it was asked for."""

    def __init__(self, largest=1 << 62, error=RuntimeError):
        self.largest = largest
        self.error = error
        self.asked = []
        self.slabs = []

    def __call__(self, size_bytes, pinned):
        self.asked.append((size_bytes, pinned))
        if size_bytes > self.largest:
            raise self.error("no such luck")
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        self.slabs.append(weakref.ref(memory))
        return memory

    @property
    def held_bytes(self):
        return sum(memory.numel() for slab in self.slabs if (memory := slab()) is not None)


class Event:
    """The event of a fence; ``on_wait`` is called when the host waits for it."""

    def __init__(self, on_wait):
        self.synchronize = on_wait


def make_pool(limit=MIB, slab=64 * KIB, system=None, pin=False):
    return HostPool(HostPoolSettings(limit, pin), allocate=system or System(), slab_bytes=slab)


@pytest.fixture
def log(caplog):
    logger.addHandler(caplog.handler)  # DeepSpeed's logger does not propagate
    level = logger.level
    logger.setLevel("INFO")
    yield caplog
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


def test_a_lease_is_a_view_of_exactly_what_was_asked_for():
    pool = make_pool()
    lease = pool.lease(1000)
    assert (lease.memory.dtype, lease.memory.shape, lease.size_bytes) == (torch.uint8, (1000,), 1000)
    assert lease.memory.untyped_storage().nbytes() == 64 * KIB
    assert lease.fences == ()
    stats = pool.stats()
    assert (stats.pinned_bytes, stats.leased_bytes, stats.requested_bytes) == (64 * KIB, 1024, 1000)
    assert (stats.allocations, stats.hits, stats.limit_bytes) == (1, 0, MIB)


def test_figures_of_many_leases():
    pool = make_pool()
    leases = [pool.lease(size) for size in (1, 512, 513, 64 * KIB)]
    for lease in leases[:3]:
        lease.give_back()
    stats = pool.stats()
    assert (stats.pinned_bytes, stats.allocations, stats.hits) == (128 * KIB, 2, 2)
    assert (stats.leased_bytes, stats.requested_bytes) == (64 * KIB, 64 * KIB)
    assert stats.peak_leased_bytes == 64 * KIB + 512 + 512 + 1024


def test_blocks_begin_at_multiples_of_512_bytes():
    pool = make_pool()
    leases = [pool.lease(size) for size in (1, 513, 1)]
    base = leases[0].memory.data_ptr()
    assert [lease.memory.data_ptr() - base for lease in leases] == [0, 512, 512 + 1024]


def test_a_zero_byte_lease_takes_nothing():
    pool = make_pool(limit=0)
    lease = pool.lease(0)
    assert (lease.memory.shape, lease.size_bytes, lease.fences) == ((0,), 0, ())
    lease.give_back(None)
    assert (pool.stats().leased_bytes, pool.stats().pinned_bytes, pool.stats().hits) == (0, 0, 0)


def test_a_negative_size_is_an_error():
    with pytest.raises(ValueError, match="-1 bytes"):
        make_pool().lease(-1)


def test_memory_is_out_of_reach_once_given_back():
    lease = make_pool().lease(10)
    lease.give_back()
    with pytest.raises(OffloadStateError, match="10 bytes was given back"):
        _ = lease.memory


def test_giving_back_twice_does_not_free_the_next_users_block():
    pool = make_pool()
    first = pool.lease(1000)
    first.give_back()
    second = pool.lease(1000)
    first.give_back()
    third = pool.lease(1000)
    assert second.memory.data_ptr() != third.memory.data_ptr()
    assert pool.stats().leased_bytes == 2048


def test_the_next_user_gets_the_last_fence_of_each_stream():
    pool = make_pool()
    low, high = pool.lease(512), pool.lease(512)
    low.give_back(Fence("d2h", 1, None), None, Fence("h2d", 5, None))
    high.give_back(Fence("d2h", 2, None), Fence("h2d", 4, None))
    both = pool.lease(1024)
    assert set(both.fences) == {Fence("d2h", 2, None), Fence("h2d", 5, None)}


@pytest.mark.parametrize("pin", [True, False])
def test_slabs_are_asked_for_as_the_settings_say(pin):
    system = System()
    assert make_pool(limit=8 * MIB, slab=MIB, system=system, pin=pin).lease(3 * MIB).size_bytes == 3 * MIB
    assert system.asked == [(4 * MIB, pin)]


@pytest.mark.parametrize(("kind", "pin", "size"), [("xpu", True, 256), ("xpu", False, 16), ("cpu", True, 16)])
def test_the_default_slab_is_large_where_memory_is_pinned(monkeypatch, kind, pin, size):
    monkeypatch.setattr(pool_module, "accelerator_device", lambda: torch.device(kind))
    system = System()
    HostPool(HostPoolSettings(GIB, pin), allocate=system).lease(1)
    assert system.asked == [(size * MIB, pin)]


def test_the_process_has_one_pool():
    pool = host_pool()
    assert pool is host_pool()
    pool.add_user()
    pool.lease(100).give_back()
    assert pool.trim() == 16 * MIB
    pool.remove_user()
    assert pool.stats().pinned_bytes == 0
    pool.close()


@pytest.mark.parametrize("slab", [0, 256, 3 * 512])
def test_a_slab_size_that_cannot_be_is_an_error(slab):
    with pytest.raises(ValueError, match=f"slab_bytes is {slab}"):
        make_pool(slab=slab)


def test_beyond_the_limit_nothing_is_lent_and_the_refusal_says_why():
    system = System()
    pool = make_pool(limit=100 * KIB, slab=64 * KIB, system=system)
    kept = pool.lease(64 * KIB)
    assert pool.last_refusal is None
    assert pool.lease(40 * KIB) is None
    for part in ("is full", "40960 bytes", "65536 bytes (0.1 MiB) are pinned", "102400 bytes", "host_pool.max_bytes"):
        assert part in pool.last_refusal
    assert system.asked == [(64 * KIB, False)]
    assert pool.lease(36 * KIB).size_bytes == 36 * KIB  # all that is left
    assert pool.stats().pinned_bytes == 100 * KIB
    kept.give_back()
    assert pool.lease(40 * KIB).size_bytes == 40 * KIB


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_refusal_by_the_system_is_tried_again_with_the_smallest_slab(error):
    system = System(largest=8 * KIB, error=error)
    pool = make_pool(system=system)
    assert pool.lease(5 * KIB).size_bytes == 5 * KIB
    assert [size for size, _ in system.asked] == [64 * KIB, 8 * KIB]
    stats = pool.stats()
    assert (stats.pinned_bytes, stats.allocations, stats.refused_allocations) == (8 * KIB, 1, 1)


def test_a_refusal_by_the_system_changes_nothing_and_says_why():
    system = System(largest=8 * KIB)
    pool = make_pool(system=system, pin=True)
    kept = pool.lease(8 * KIB)
    before = pool.stats()
    assert pool.lease(9 * KIB) is None
    for part in (
        "16384 bytes",
        "RuntimeError: no such luck",
        "9216 bytes",
        "8192 bytes",
        "lower host_pool.max_bytes",
        "ulimit -l",
    ):
        assert part in pool.last_refusal
    after = pool.stats()
    assert after.refused_allocations == before.refused_allocations + 2
    assert (after.pinned_bytes, after.leased_bytes, after.allocations) == (8 * KIB, 8 * KIB, 1)
    system.largest = MIB
    assert pool.lease(9 * KIB).size_bytes == 9 * KIB
    kept.give_back()


def test_other_errors_of_the_allocator_are_not_swallowed():
    pool = make_pool(system=System(largest=0, error=TypeError))
    with pytest.raises(TypeError):
        pool.lease(1)
    assert pool.stats().leased_bytes == 0  # and the lock is free


def test_a_negative_limit_is_an_error():
    with pytest.raises(OffloadConfigError, match="max_bytes is -1"):
        HostPoolSettings(max_bytes=-1)


def test_a_lower_limit_binds_growth_only(log):
    pool = make_pool(limit=MIB)
    pool.lease(100 * KIB)
    pool.configure(HostPoolSettings(64 * KIB, pin_memory=False))
    assert pool.stats().limit_bytes == 64 * KIB
    assert pool.lease(10 * KIB).size_bytes == 10 * KIB  # out of what is held
    assert pool.lease(100 * KIB) is None
    assert log.records == []  # nobody else uses the pool


def test_an_unset_limit_is_a_share_beside_what_is_held_and_said_once(monkeypatch, log):
    shares = iter([1000 * KIB, 300 * KIB, 200 * KIB])
    monkeypatch.setattr(pool_module, "share_bytes", lambda: next(shares))
    pool = HostPool(allocate=System(), slab_bytes=64 * KIB)
    assert pool.stats().limit_bytes == 1000 * KIB
    lease = pool.lease(1)
    pool.configure(HostPoolSettings(pin_memory=True))
    pool.add_user()
    assert pool.stats().limit_bytes == 364 * KIB
    pool.configure(HostPoolSettings(pin_memory=True))  # a second engine does not move it
    assert pool.stats().limit_bytes == 364 * KIB
    assert [record.levelname for record in log.records] == ["INFO"]
    assert str(364 * KIB) in log.text
    lease.give_back()


@pytest.mark.parametrize(("new", "named", "limit"), [(2 * MIB, "2097152", 2 * MIB), (None, "automatic", 300 * KIB)])
def test_changing_a_limit_under_another_user_warns_with_both_values(monkeypatch, log, new, named, limit):
    monkeypatch.setattr(pool_module, "share_bytes", lambda: 300 * KIB)
    pool = make_pool(limit=MIB)
    pool.add_user()
    pool.configure(HostPoolSettings(MIB, pin_memory=False))
    assert log.records == []
    pool.configure(HostPoolSettings(new, pin_memory=False))
    (warning,) = [record for record in log.records if record.levelname == "WARNING"]
    assert "1048576" in warning.getMessage()
    assert named in warning.getMessage()
    assert pool.stats().limit_bytes == limit


def test_setting_a_limit_that_was_automatic_is_no_contradiction(log):
    pool = make_pool(limit=None)
    pool.add_user()
    pool.configure(HostPoolSettings(MIB, pin_memory=False))
    assert log.records == []
    assert pool.stats().limit_bytes == MIB


def test_changing_pin_memory_frees_what_it_can_and_warns_of_the_rest(log):
    system = System()
    pool = make_pool(system=system)
    pool.lease(100).give_back()
    pool.configure(HostPoolSettings(MIB, pin_memory=True))
    assert log.records == []
    lease = pool.lease(100)
    assert system.asked[-1] == (64 * KIB, True)
    pool.configure(HostPoolSettings(MIB, pin_memory=False))
    assert "pin_memory was True and is False" in log.text
    assert pool.stats().pinned_bytes == 64 * KIB
    lease.give_back()


def test_trim_waits_for_the_last_uses_of_empty_slabs_before_it_frees_them(monkeypatch):
    system, waits, emptied = System(), [], []
    monkeypatch.setattr(pool_module, "unpin_unused_host", lambda: emptied.append(system.held_bytes))
    pool = make_pool(system=system)

    def fence(stream, number):
        return Fence(stream, number, Event(lambda: waits.append((stream, number, system.held_bytes))))

    first, second, third = (pool.lease(64 * KIB) for _ in range(3))
    first.give_back(fence("d2h", 1), fence("h2d", 2))
    second.give_back(fence("h2d", 3))
    assert waits == []
    assert pool.trim() == 128 * KIB
    assert sorted(waits) == [("d2h", 1, 192 * KIB), ("h2d", 3, 192 * KIB)]
    assert system.held_bytes == 64 * KIB
    assert emptied == [64 * KIB]
    assert pool.trim() == 0
    assert (len(waits), len(emptied)) == (2, 1)
    third.give_back()


def test_trim_keeps_slabs_in_use_and_their_content():
    pool = make_pool()
    lease, other = pool.lease(512), pool.lease(512)
    lease.memory.fill_(7)
    other.give_back()
    assert pool.trim() == 0
    assert bool((lease.memory == 7).all())
    lease.give_back()
    assert pool.trim() == 64 * KIB


def test_close_names_live_leases_and_loses_nothing():
    system = System()
    pool = make_pool(system=system)
    lease, full = pool.lease(1000), pool.lease(64 * KIB)
    lease.memory.fill_(7)
    full.give_back()
    with pytest.raises(OffloadStateError, match=r"1024 bytes .* leased at close"):
        pool.close()
    assert system.held_bytes == 64 * KIB
    assert bool((lease.memory == 7).all())
    lease.give_back()
    pool.close()
    assert system.held_bytes == 0
    assert pool.lease(1000).size_bytes == 1000


def test_with_the_last_user_go_the_slabs_as_soon_as_their_leases_are_back():
    system = System()
    pool = make_pool(system=system)
    pool.add_user()
    pool.add_user()
    lease, other = pool.lease(64 * KIB), pool.lease(64 * KIB)
    other.give_back()
    pool.remove_user()
    assert system.held_bytes == 128 * KIB  # somebody may still want it
    pool.remove_user()
    assert system.held_bytes == 64 * KIB
    lease.give_back()
    assert pool.stats().pinned_bytes == 0
    assert system.held_bytes == 0
    pool.add_user()
    pool.lease(100).give_back()
    assert pool.stats().pinned_bytes == 64 * KIB  # kept again


def test_without_any_user_slabs_are_kept():
    pool = make_pool()
    pool.lease(100).give_back()
    assert pool.stats().pinned_bytes == 64 * KIB


@pytest.mark.gpu
@pytest.mark.skipif(
    get_accelerator().device_name() != "cuda", reason="torch has figures of pinned memory for CUDA only"
)
def test_pinned_memory_is_what_the_pool_says_and_trim_unpins_it():
    def held_by_torch():
        return torch.cuda.host_memory_stats()["allocated_bytes.current"]

    device = torch.device("cuda", torch.cuda.current_device())
    streams = make_streams(device)
    source = torch.arange(200, dtype=torch.uint8, device=device).repeat(MIB)
    pool = HostPool(HostPoolSettings(GIB, pin_memory=True))
    before = held_by_torch()
    lease = pool.lease(source.numel())
    assert lease.memory.is_pinned()
    assert held_by_torch() - before == pool.stats().pinned_bytes == 256 * MIB
    streams.wait(streams.d2h, streams.fence(streams.compute()))
    streams.copy(streams.d2h, lease.memory, source)
    lease.give_back(streams.fence(streams.d2h))
    assert pool.trim() == 256 * MIB
    assert held_by_torch() == before
