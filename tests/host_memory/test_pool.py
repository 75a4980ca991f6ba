"""The host pool: what is lent, what follows a block to its next user, and what happens at the limits."""

import os
import time
from contextlib import nullcontext

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_fgoffload.device.pinning import register_host
from ds_fgoffload.device.streams import Fence, make_streams
from ds_fgoffload.errors import OffloadConfigError, OffloadStateError
from ds_fgoffload.host_memory import budget as budget_module
from ds_fgoffload.host_memory import pool as pool_module
from ds_fgoffload.host_memory import slabs as region_module
from ds_fgoffload.host_memory import slabs as supply_module
from ds_fgoffload.host_memory.budget import Budget, Room
from ds_fgoffload.host_memory.lease import Account
from ds_fgoffload.host_memory.node_ledger import Ledger
from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings, host_pool
from ds_fgoffload.saved.transfer import Transfer
from ds_fgoffload.stats import UnitStats

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class System:
    """Gives a pool slabs of at most ``largest`` bytes, and remembers what it was asked for."""

    def __init__(self, largest=1 << 62, error=RuntimeError):
        self.largest = largest
        self.error = error
        self.asked = []

    def stand_behind(self, pool):
        self.slab_source, self.take = pool._slab_source, pool._slab_source._take
        pool._slab_source._take = self._take

    def _take(self, region, slab_bytes, *, pin):
        self.asked.append((slab_bytes, pin))
        if slab_bytes > self.largest:
            raise self.error("no such luck")
        return self.take(region, slab_bytes, pin=pin)

    @property
    def held_bytes(self):
        return sum(slab.size_bytes for region in self.slab_source.regions.values() for slab in region.slabs)


class Event:
    """The event of a fence; ``on_wait`` is called when the host waits for it."""

    def __init__(self, on_wait):
        self.synchronize = on_wait


def make_pool(limit=MIB, slab=64 * KIB, system=None, pin=False, **settings):
    pool = HostPool(HostPoolSettings(limit, pin, **settings), slab_bytes=slab, background=False)
    (system or System()).stand_behind(pool)
    return pool


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
def test_slabs_have_the_size_that_is_missing(pin):
    system = System()
    pool = make_pool(limit=8 * MIB, slab=64 * KIB, system=system, pin=pin)
    small = pool.lease(3 * KIB)
    assert pool.lease(1000 * KIB).size_bytes == 1000 * KIB  # from what the first left and what lies beside it
    assert system.asked == [(64 * KIB, pin), (960 * KIB, pin)]
    small.give_back()


@pytest.mark.parametrize(("kind", "pin", "size"), [("xpu", True, 16), ("xpu", False, 2), ("cpu", True, 2)])
def test_the_default_slab_is_large_where_memory_is_pinned(monkeypatch, kind, pin, size):
    monkeypatch.setattr(pool_module, "accelerator_is_cpu", lambda: kind == "cpu")
    system, pool = System(), HostPool(HostPoolSettings(GIB, pin), background=False)
    system.stand_behind(pool)
    pool.lease(1)
    assert system.asked == [(size * MIB, pin)]


def test_the_process_has_one_pool():
    pool = host_pool()
    assert pool is host_pool()
    user = pool.add_user()
    pool.lease(100).give_back()
    assert pool.trim() == 2 * MIB
    user.leave()
    assert pool.stats().pinned_bytes == 0
    pool.close()


@pytest.mark.parametrize("slab", [0, 512, 4096 + 512])
def test_a_slab_size_that_cannot_be_is_an_error(slab):
    with pytest.raises(ValueError, match=f"slab_bytes is {slab}"):
        make_pool(slab=slab)


def test_beyond_the_limit_nothing_is_lent_and_the_refusal_says_why():
    system = System()
    pool = make_pool(limit=100 * KIB, slab=64 * KIB, system=system)
    kept = pool.lease(64 * KIB)
    assert pool.last_refusal is None
    assert pool.lease(40 * KIB) is None
    for part in ("is full", "40960 bytes", "65536 bytes (0.1 MiB) are held", "102400 bytes", "host_pool.max_bytes"):
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
    pool = make_pool(system=system, pin=True, on_pin_failure="keep")
    kept = pool.lease(8 * KIB)
    before = pool.stats()
    assert pool.lease(9 * KIB) is None
    for part in ("page-lock 12288 bytes", "RuntimeError: no such luck", "9216 bytes", "8192 bytes", "pin_memory"):
        assert part in pool.last_refusal
    after = pool.stats()
    assert after.refused_allocations == before.refused_allocations + 2
    assert (after.pinned_bytes, after.leased_bytes, after.allocations) == (8 * KIB, 8 * KIB, 1)
    kept.give_back()


def test_a_system_that_refused_is_not_asked_again_at_once(monkeypatch):
    now = 0.0
    monkeypatch.setattr(supply_module.time, "monotonic", lambda: now)
    system = System(largest=8 * KIB)
    pool = make_pool(system=system)
    assert pool.lease(9 * KIB) is None
    asked = len(system.asked)
    assert pool.lease(10 * KIB) is None
    assert "no such luck" in pool.last_refusal
    assert len(system.asked) == asked
    assert pool.lease(8 * KIB).size_bytes == 8 * KIB  # less than what was refused
    system.largest = MIB
    assert pool.lease(9 * KIB) is None
    now = supply_module.RETRY_AFTER_S
    assert pool.lease(9 * KIB).size_bytes == 9 * KIB


@pytest.mark.parametrize("k", range(1, 51))
def test_a_pin_that_fails_once_is_named_and_costs_nothing(monkeypatch, log, k):
    calls = []

    def register(address, size_bytes):
        calls.append(size_bytes)
        if len(calls) == k:
            raise RuntimeError("CUDA error: out of memory (2)")
        return True

    monkeypatch.setattr(region_module, "register_host", register)
    pool = make_pool(limit=8 * MIB, slab=4 * KIB, pin=True, system=System())
    leases = [pool.lease(4 * KIB) for _ in range(60)]
    assert None not in leases
    stats = pool.stats()
    assert (stats.refused_allocations, stats.leased_bytes) == (1, 240 * KIB)
    (warning,) = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert "refused to page-lock" in warning
    assert "CUDA error: out of memory (2)" in warning
    assert "host_pool.max_bytes" in warning
    for lease in leases:
        lease.give_back()
    pool.close()
    assert pool.stats().pinned_bytes == pool.stats().pageable_bytes == 0


@pytest.mark.parametrize(("choice", "lent"), [("pageable", True), ("keep", False)])
def test_a_system_that_never_pins(monkeypatch, choice, lent):
    def refuse(address, size_bytes):
        raise RuntimeError("no")

    monkeypatch.setattr(region_module, "register_host", refuse)
    pool = make_pool(pin=True, on_pin_failure=choice)
    lease = pool.lease(KIB)
    assert (lease is not None) == lent
    assert pool.stats().pageable_bytes == pool.stats().pinned_bytes == (4 * KIB if lent else 0)
    if lent:
        lease.give_back()
    pool.close()
    assert pool.stats().pageable_bytes == 0


def test_an_accelerator_that_pins_only_its_own_memory(monkeypatch):
    asked = []

    def allocate(size_bytes):
        asked.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    monkeypatch.setattr(region_module, "register_host", lambda address, size_bytes: False)
    monkeypatch.setattr(supply_module, "allocate_pinned", allocate)
    emptied = []
    monkeypatch.setattr(supply_module, "unpin_unused_host", lambda: emptied.append(True))
    pool = make_pool(pin=True)
    leases = [pool.lease(50 * KIB) for _ in range(3)]
    assert asked == [64 * KIB] * 3
    assert len({lease.memory.untyped_storage().data_ptr() for lease in leases}) == 3
    for lease in leases:
        lease.give_back()
    assert pool.trim() == 3 * 64 * KIB
    assert (emptied, pool._slab_source.regions) == ([True], {})


def test_what_the_system_has_left_bounds_growth_whatever_the_limit(monkeypatch):
    left = 200 * MIB
    monkeypatch.setattr(budget_module, "room", lambda: Room(left, 256 * MIB, "the cgroup"))
    system = System()
    pool = make_pool(limit=GIB, slab=MIB, system=system)
    first = pool.lease(MIB)
    left = 17 * MIB  # of which a sixteenth of the whole stays with the system
    second = pool.lease(MIB)
    assert pool.lease(2 * MIB) is None
    assert len(system.asked) == 2
    for part in ("the host pool is full", "17825792 bytes", "left to the cgroup", "raise the memory limit"):
        assert part in pool.last_refusal
    left = 200 * MIB
    assert pool.lease(2 * MIB) is not None
    del first, second


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


@pytest.fixture
def one_gib_left(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(budget_module, "room", lambda: Room(GIB, 4 * GIB, "the system"))


def test_an_unset_limit_is_a_share_of_half_of_what_is_left_and_said_once(one_gib_left, log):
    pool = HostPool(slab_bytes=64 * KIB, background=False)
    pool.configure(HostPoolSettings())
    pool.add_user()
    pool.configure(HostPoolSettings())
    assert pool.stats().limit_bytes == pool.stats().share_bytes == GIB // 8
    assert [record.levelname for record in log.records] == ["INFO"]
    assert str(GIB // 8) in log.text
    assert "4 ranks" in log.text


@pytest.mark.parametrize(
    ("settings", "limit", "share"),
    [
        ({"max_bytes": MIB}, MIB, MIB),
        ({"node_max_bytes": 8 * MIB}, 2 * MIB, 2 * MIB),  # without a ledger nobody borrows
        ({"max_bytes": 4 * MIB, "node_max_bytes": 8 * MIB}, 2 * MIB, 2 * MIB),
        ({"max_bytes": MIB, "node_max_bytes": 8 * MIB}, MIB, MIB),
    ],
)
def test_limits_alone(one_gib_left, settings, limit, share):
    budget = Budget(HostPoolSettings(**settings), None)
    assert (budget.limit_bytes, budget.share_bytes) == (limit, share)


@pytest.mark.parametrize(
    ("settings", "limit", "share"),
    [
        ({}, GIB // 2, GIB // 8),
        ({"max_bytes": MIB}, MIB, MIB),
        ({"node_max_bytes": 8 * MIB}, 8 * MIB, 2 * MIB),
        ({"max_bytes": 4 * MIB, "node_max_bytes": 8 * MIB}, 4 * MIB, 2 * MIB),
    ],
)
def test_limits_among_others(one_gib_left, tmp_path, settings, limit, share):
    budget = Budget(HostPoolSettings(**settings), Ledger(tmp_path / "ledger"))
    assert (budget.limit_bytes, budget.share_bytes) == (limit, share)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "raise host_pool.max_bytes or"),
        ({"max_bytes": KIB}, "raise host_pool.max_bytes or"),
        ({"node_max_bytes": KIB}, "raise host_pool.node_max_bytes or"),
        ({"max_bytes": MIB, "node_max_bytes": KIB}, "raise host_pool.node_max_bytes or"),
        ({"max_bytes": KIB, "node_max_bytes": MIB}, "raise host_pool.max_bytes or"),
    ],
)
def test_a_full_pool_names_the_bound_that_it_was(one_gib_left, settings, remedy):
    pool = HostPool(HostPoolSettings(pin_memory=False, **settings), background=False)
    assert pool.lease(GIB) is None
    assert pool.last_refusal.endswith(f"; {remedy} offload less")


def test_a_full_pool_names_the_limit_of_locked_memory(one_gib_left, monkeypatch):
    monkeypatch.setattr(budget_module, "memlock_bytes", lambda: 8 * KIB)
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    pool = HostPool(background=False)
    assert pool.lease(MIB) is None
    assert "raise the limit of locked memory (ulimit -l) or offload less" in pool.last_refusal


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ({}, GIB // 8),  # a share, though a ledger would let it borrow half of what is left
        ({"max_bytes": MIB}, MIB),
        ({"max_bytes": GIB // 8}, GIB // 8),
        ({"max_bytes": 900 << 40}, (GIB - GIB // 4) // 8),  # a sixteenth of 4 GiB stays with the system
    ],
)
def test_no_more_than_a_safe_share_is_preallocated_and_a_warning_says_so(one_gib_left, log, tmp_path, settings, ahead):
    pool = HostPool(ledger=Ledger(tmp_path / "ledger"), background=False)
    pool.configure(HostPoolSettings(preallocate_bytes=900 << 40, **settings))
    pool.add_user()
    assert pool._ahead_bytes() == ahead
    (warned,) = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert f"no more than {ahead} bytes" in warned
    log.clear()
    pool.configure(HostPoolSettings(preallocate_bytes=MIB, **settings))
    assert not [record for record in log.records if "preallocate" in record.getMessage()]


def test_the_limit_of_locked_memory_binds_where_memory_is_locked_by_mlock(one_gib_left, monkeypatch):
    monkeypatch.setattr(budget_module, "memlock_bytes", lambda: 8 * MIB)
    assert Budget(HostPoolSettings(), None).limit_bytes == GIB // 8
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    assert Budget(HostPoolSettings(), None).limit_bytes == 8 * MIB


@pytest.mark.parametrize(("new", "named", "limit"), [(2 * MIB, "2097152", 2 * MIB), (None, "automatic", GIB // 8)])
def test_changing_a_limit_under_another_user_warns_with_both_values(one_gib_left, log, new, named, limit):
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


def test_trim_waits_for_the_last_uses_of_free_slabs_before_it_frees_them():
    system, waits = System(), []
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
    assert pool.trim() == 0
    assert len(waits) == 2
    third.give_back()


def test_trim_keeps_as_much_as_is_asked_for_and_frees_the_last_first():
    system = System()
    pool = make_pool(system=system)
    leases = [pool.lease(64 * KIB) for _ in range(4)]
    for lease in leases:
        lease.give_back()
    assert pool.trim(keep_bytes=150 * KIB) == 128 * KIB
    assert pool.lease(128 * KIB).size_bytes == 128 * KIB
    assert len(system.asked) == 4


def test_a_device_that_has_failed_does_not_keep_memory():
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    pool = make_pool()
    pool.lease(KIB).give_back(Fence("d2h", 1, Event(fail)))
    pool.close()
    assert pool.stats().pinned_bytes == 0


def test_memory_grows_again_after_a_trim_in_the_middle():
    pool = make_pool(limit=MIB)
    leases = [pool.lease(64 * KIB) for _ in range(3)]
    leases.pop(1).give_back()
    assert pool.trim() == 64 * KIB
    leases += [pool.lease(64 * KIB), pool.lease(128 * KIB)]
    for number, lease in enumerate(leases):
        lease.memory.fill_(number)
    assert [int(lease.memory.sum()) // lease.size_bytes for lease in leases] == [0, 1, 2, 3]
    for lease in leases:
        lease.give_back()
    pool.close()


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
    users = [pool.add_user(), pool.add_user()]
    lease, other = pool.lease(64 * KIB), pool.lease(64 * KIB)
    other.give_back()
    users[0].leave()
    users[0].leave()
    assert system.held_bytes == 128 * KIB  # somebody may still want it
    users[1].leave()
    assert system.held_bytes == 64 * KIB
    lease.give_back()
    assert pool.stats().pinned_bytes == 0
    assert system.held_bytes == 0
    pool.add_user()
    pool.lease(100).give_back()
    assert pool.stats().pinned_bytes == 64 * KIB  # kept again


def test_every_user_has_an_account_and_a_quota():
    pool = make_pool()
    actor, critic = pool.add_user("Engine"), pool.add_user("Engine", quota_bytes=2 * KIB)
    assert (actor.name, critic.name) == ("Engine", "Engine 2")
    lease, first = actor.lease(3000), critic.lease(1500)
    assert critic.lease(1500) is None
    for part in ("full for Engine 2", "1500 bytes", "1536 bytes", "2048 bytes", "host_pool.quota_bytes"):
        assert part in critic.last_refusal
    assert actor.last_refusal is None
    first.give_back()
    second = critic.lease(1500)
    assert pool.stats().engines == {
        "Engine": Account(None, 3000, 3072, 3072, leases=1),
        "Engine 2": Account(2 * KIB, 1500, 1536, 1536, leases=2, refused_leases=1),
    }
    critic.leave()
    second.give_back()
    assert list(pool.stats().engines) == ["Engine"]
    lease.give_back()
    assert pool.stats().engines["Engine"].leased_bytes == 0


def test_without_any_user_slabs_are_kept():
    pool = make_pool()
    pool.lease(100).give_back()
    assert pool.stats().pinned_bytes == 64 * KIB


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def test_the_housekeeping_thread_takes_memory_ahead_of_need_and_no_more_than_that():
    pool = HostPool(HostPoolSettings(64 * MIB, pin_memory=False), slab_bytes=4 * KIB)
    leases = [pool.lease(MIB) for _ in range(8)]
    until(lambda: pool.stats().pinned_bytes > 8 * MIB + 8 * MIB // 64)
    until(lambda: pool._housekeeping._thread is None)
    assert pool.stats().pinned_bytes <= 8.3 * MIB
    before = pool.stats()
    leases.append(pool.lease(100 * KIB))
    assert pool.stats().hits == before.hits + 1
    for lease in leases:
        lease.give_back()
    pool.close()


def test_the_housekeeping_thread_works_for_the_device_of_the_thread_that_trains(monkeypatch):
    device, entered = torch.device("xpu", 3), []
    monkeypatch.setattr(pool_module, "accelerator_device", lambda: device)
    monkeypatch.setattr(pool_module, "on_device", lambda device: entered.append(device) or nullcontext())
    pool = HostPool(HostPoolSettings(64 * MIB, pin_memory=False), slab_bytes=4 * KIB)
    lease = pool.lease(MIB)
    until(lambda: entered)
    assert entered[0] == device
    lease.give_back()
    pool.close()


def test_the_housekeeping_thread_rests_after_a_refusal_and_only_then():
    system = System()
    pool = HostPool(HostPoolSettings(64 * MIB, pin_memory=False), slab_bytes=4 * KIB, background=False)
    system.stand_behind(pool)
    lease = pool.lease(8 * MIB)
    peaks = []

    def grow_while_another_leases(wanted_bytes):
        peaks.append(pool._leases.recent_peak_bytes)
        pool._leases.recent_peak_bytes *= 2
        return False

    grow, pool._allocator.grow = pool._allocator.grow, grow_while_another_leases
    pool._do_housekeeping()
    assert pool._ahead_bytes() > 0
    pool._allocator.grow = grow
    system.largest = 0
    pool._do_housekeeping()
    assert len(system.asked) == 2
    assert pool._ahead_bytes() == 0
    lease.give_back()
    pool.close()


def test_preallocation_happens_in_the_background_once_there_is_a_user():
    pool = HostPool(HostPoolSettings(64 * MIB, pin_memory=False, preallocate_bytes=8 * MIB), slab_bytes=4 * KIB)
    pool.add_user()
    until(lambda: pool.stats().pinned_bytes == 8 * MIB)
    pool._housekeeping.stop()  # the lease would have it take more, ahead of need
    allocations = pool.stats().allocations
    lease = pool.lease(8 * MIB)
    assert pool.stats().allocations == allocations
    lease.give_back()
    pool.close()


def test_an_idle_pool_gives_memory_back():
    pool = HostPool(HostPoolSettings(64 * MIB, pin_memory=False, idle_trim_s=0.0), slab_bytes=4 * KIB)
    lease = pool.lease(MIB)
    until(lambda: pool._housekeeping._thread is not None)
    assert pool._do_housekeeping() == pool_module.HOUSEKEEPING_S
    assert pool.stats().pinned_bytes >= MIB  # in use
    lease.give_back()
    pool._do_housekeeping()
    assert pool.stats().pinned_bytes == 0


def test_a_forked_child_has_a_pool_of_its_own():
    pool = HostPool(HostPoolSettings(64 * MIB, pin_memory=False), slab_bytes=4 * KIB)
    lease = pool.lease(MIB)
    child = os.fork()
    if child == 0:
        lease.give_back()
        good = pool.stats().pinned_bytes == 0 and pool.lease(KIB).memory.fill_(1).sum() == KIB
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lease.memory.fill_(7)
    assert int(lease.memory[-1]) == 7
    lease.give_back()
    pool.close()


@pytest.mark.gpu
@pytest.mark.skipif(get_accelerator().device_name() != "cuda", reason="registers host memory with CUDA")
def test_pinned_memory_is_pinned_across_slabs_and_trim_unpins_it():
    device = torch.device("cuda", torch.cuda.current_device())
    streams = make_streams(device)
    transfer, stats = Transfer(streams), UnitStats()
    source = torch.arange(200, dtype=torch.uint8, device=device).repeat(MIB)
    pool = HostPool(HostPoolSettings(GIB), background=False)
    halves = [pool.lease(source.numel() // 2) for _ in range(2)]
    for half in halves:
        half.give_back()
    lease = pool.lease(source.numel())
    assert lease.memory.is_pinned()
    assert len(lease.beside(source)) == pool.stats().allocations == 2
    end = transfer.offload(source, lease, streams.compute(), stats)
    transfer.before_release(end, stats)
    back, copied_in = transfer.reload(lease, streams.compute(), stats)
    transfer.before_use(copied_in, streams.compute(), stats)
    assert torch.equal(back, source)
    lease.give_back(end, copied_in)
    pinned_bytes = pool.stats().pinned_bytes
    assert pinned_bytes >= source.numel()
    assert (pool.trim(), pool.stats().pinned_bytes) == (pinned_bytes, 0)


@pytest.mark.gpu
@pytest.mark.skipif(get_accelerator().device_name() != "cuda", reason="registers host memory with CUDA")
def test_a_refused_pin_is_not_blamed_on_the_next_kernel():
    with pytest.raises(RuntimeError):
        register_host(4096, 4096)  # nothing is mapped there
    assert int(torch.ones(8, device="cuda").sum()) == 8
    torch.cuda.synchronize()
