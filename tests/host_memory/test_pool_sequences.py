"""The host pool over time: any sequence of leases and returns, threads, the garbage collector, new shapes, cost."""

import gc
import itertools
import random
import threading
import time

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ds_fgoffload.device.streams import Fence
from tests.host_memory.test_pool import GIB, KIB, MIB, Event, System, make_pool


@pytest.mark.timeout(20)
def test_the_garbage_collector_may_give_back_and_remove_users_inside_a_lease():
    done, fence = [], Fence("h2d", 1, Event(lambda: None))

    class Holder:
        def __init__(self, pool):
            self.user, self.lease, self.cycle = pool.add_user(), pool.lease(512), self

        def __del__(self):
            self.lease.give_back(fence)
            self.user.leave()
            done.append(True)  # a deadlock that a time-out ends in here is swallowed

    class CollectingSystem(System):
        def _take(self, region, slab_bytes, *, pin):
            gc.collect()  # the pool is amid dealing with the system here
            return super()._take(region, slab_bytes, pin=pin)

    system = CollectingSystem()
    pool = make_pool(system=system)
    user = pool.add_user()
    Holder(pool)
    assert pool.stats().leased_bytes == 512
    big = pool.lease(64 * KIB)
    assert len(system.asked) == 2
    assert done == [True]
    assert pool.stats().leased_bytes == 64 * KIB
    assert pool.lease(512).fences == (fence,)
    big.give_back()
    assert list(pool.stats().engines) == ["engine"]
    user.leave()
    assert pool.stats().pinned_bytes == 64 * KIB  # both users are gone, one lease is not


@pytest.mark.timeout(60)
def test_threads_share_the_pool():
    pool = make_pool(limit=4 * MIB)
    wrong = []

    def work(seed):
        numbers, live = random.Random(seed), []
        for _ in range(600):
            if len(live) < 20 and (lease := pool.lease(numbers.randrange(1, 20 * KIB))) is not None:
                lease.memory.fill_(seed)
                live.append(lease)
            elif live:
                lease = live.pop(numbers.randrange(len(live)))
                if not bool((lease.memory == seed).all()):
                    wrong.append(seed)
                lease.give_back()
        for lease in live:
            lease.give_back()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = pool.stats()
    assert (stats.leased_bytes, stats.requested_bytes) == (0, 0)
    assert pool.trim() == stats.pinned_bytes


class AnySequence(RuleBasedStateMachine):
    """Random leases and returns, against a list of live blocks and a list of every fence ever given back."""

    leases = Bundle("leases")
    returned = Bundle("returned")

    def __init__(self):
        super().__init__()
        self.system = System()
        self.pool = make_pool(limit=300 * KIB, slab=16 * KIB, system=self.system)
        self.live = {}
        self.uses = []  # (start, end, fence)
        self.count = 0

    @rule(target=leases, size=st.one_of(st.integers(1, 4 * KIB), st.integers(1, 40 * KIB), st.just(512)))
    def lease(self, size):
        lease = self.pool.lease(size)
        if lease is None:
            assert self.pool.last_refusal
            return None
        self.count += 1
        tag = self.count % 251
        lease.memory.fill_(tag)
        block = lease.taken
        self.live[lease] = (tag, block)
        got = {fence.stream: fence.number for fence in lease.fences}
        assert len(got) == len(lease.fences)
        for start, end, fence in self.uses:
            if start < block.end and block.start < end:
                assert got.get(fence.stream, -1) >= fence.number
        return lease

    @rule(target=returned, lease=consumes(leases), streams=st.sets(st.sampled_from(["compute", "d2h", "h2d"])))
    def give_back(self, lease, streams):
        if lease is None:
            return None
        tag, block = self.live.pop(lease)
        assert bool((lease.memory == tag).all())  # nobody else wrote into it
        self.count += 1
        fences = [Fence(stream, self.count, Event(lambda: None)) for stream in sorted(streams)]
        self.uses += [(block.start, block.end, fence) for fence in fences]
        lease.give_back(None, *fences)
        return lease

    @rule(lease=returned)
    def give_back_again(self, lease):
        if lease is not None:
            lease.give_back()

    @rule()
    def trim(self):
        before = self.pool.stats().pinned_bytes
        assert before - self.pool.trim() == self.pool.stats().pinned_bytes

    @rule(largest=st.sampled_from([0, 4 * KIB, 16 * KIB, GIB]))
    def system_changes_its_mind(self, largest):
        self.system.largest = largest

    @invariant()
    def figures_agree(self):
        stats = self.pool.stats()
        assert stats.pinned_bytes == self.system.held_bytes <= stats.limit_bytes
        assert stats.leased_bytes == sum(block.end - block.start for _, block in self.live.values())
        assert stats.requested_bytes == sum(lease.size_bytes for lease in self.live)
        assert stats.leased_bytes <= min(stats.peak_leased_bytes, stats.pinned_bytes)

    @invariant()
    def blocks_lie_in_their_slab_and_not_in_each_other(self):
        spans = []
        for lease, (_, block) in self.live.items():
            region = self.pool._slab_source.regions[block.region]
            offset = block.start - block.region
            assert offset % 512 == 0
            inside = [slab for slab in region.slabs if slab.start < block.end and block.start < slab.end]
            assert (inside[0].start <= block.start, inside[-1].end >= block.end) == (True, True)
            assert all(before.end == after.start for before, after in itertools.pairwise(inside))
            assert lease.memory.data_ptr() == region.memory.data_ptr() + offset
            spans.append((lease.memory.data_ptr(), lease.memory.data_ptr() + lease.size_bytes))
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))

    def teardown(self):
        for lease in self.live:
            lease.give_back()
        self.live.clear()
        self.pool.stats()
        free = sum(block.end - block.start for block in self.pool._leases._free_ranges.by_address())
        assert free == self.system.held_bytes
        self.pool.trim()
        assert self.pool.stats().pinned_bytes == self.system.held_bytes == 0


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_shapes_that_change_every_step_do_not_grow_the_pool(seed, in_flight):
    """Micro-batches of 15 to 25 blocks, all drawn anew; the oldest ends, newest block first, when the next begins.

    Steps 20 and on are as large as any, so that what grows later would be fragmentation.
    """
    numbers = random.Random(seed)
    pool = make_pool(limit=GIB, slab=64 * KIB)
    alive, pinned = [], []
    for step in range(1000):
        scale = 1 if 20 <= step < 20 + in_flight else numbers.uniform(0.3, 1)
        weights = [numbers.random() for _ in range(numbers.randrange(15, 26))]
        if len(alive) == in_flight:
            for lease in reversed(alive.pop(0)):
                lease.give_back()
        alive.append([pool.lease(int(scale * 16 * MIB / in_flight * weight / sum(weights))) for weight in weights])
        pinned.append(pool.stats().pinned_bytes)
    ratio = pinned[-1] / pool.stats().peak_leased_bytes
    print(f"pinned {pinned[-1] / MIB} MiB, {ratio:.3f} of the peak of what was leased")
    assert pinned[60:] == [pinned[60]] * 940
    assert ratio <= 1.05


def test_a_lease_costs_no_more_with_thousands_of_blocks_than_with_few():
    numbers = random.Random(0)
    fences = (Fence("d2h", 1, None), Fence("h2d", 2, None))
    sizes = [numbers.randrange(1, 100 * KIB) for _ in range(1000)]

    def pool_with(blocks):
        """Half of the blocks are leased, in no order."""
        pool = make_pool(limit=2 * GIB, slab=64 * MIB)
        live = [pool.lease(numbers.randrange(1, 100 * KIB)) for _ in range(blocks)]
        numbers.shuffle(live)
        for _ in range(blocks // 2):
            live.pop().give_back(*fences)
        return pool, live

    def microseconds(pool):
        begin = time.perf_counter()
        for size in sizes:
            pool.lease(size).give_back(*fences)
        return (time.perf_counter() - begin) / len(sizes) * 1e6

    (few, few_live), (many, many_live) = pool_with(40), pool_with(4000)
    rounds = [(microseconds(few), microseconds(many)) for _ in range(10)]  # in turn, so that both meet the same load
    few_us, many_us = (min(times) for times in zip(*rounds, strict=True))
    print(f"lease and give_back: {few_us:.1f} us among {len(few_live)} leases, {many_us:.1f} among {len(many_live)}")
    assert many_us < 6 * few_us  # a search through all blocks would take fifty times as long
