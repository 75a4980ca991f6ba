"""Lends blocks out of slabs, and takes slabs from the system or gives them back. Thread-safe.

:class:`Allocator` is what the pool calls. Its :class:`LeaseTable` knows what is free, what is on lease and to whom: in
memory alone, and never waiting. There are two locks. That of the table is held for microseconds; ``system`` is held by
whoever deals with the system, which may take long. Nobody who holds the first waits for the second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from ds_fgoffload.device.streams import Fence, latest
from ds_fgoffload.host_memory.free_ranges import ALIGNMENT_BYTES, LARGEST_SLAB_BYTES, FreeRanges, Range, rounded_up
from ds_fgoffload.host_memory.lease import Account, Lease, Note
from ds_fgoffload.host_memory.slabs import PAGE_BYTES, Slab, SlabSource


class LeaseTable:
    """Not thread-safe but for ``inbox``: whoever calls a method holds ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inbox: deque[Note] = deque()
        """What was given back and who has left. Anybody may append at any moment, also a finalizer."""
        self.accounts: dict[str, Account] = {}
        self.retains = True
        """False between the going of the last user and the coming of the next."""
        self.leased_bytes = self.peak_leased_bytes = self.requested_bytes = 0
        self.recent_peak_bytes = 0
        """The peak since slabs were last given back to the system."""
        self._free_ranges: FreeRanges[Fence] = FreeRanges(merge=latest)

    def open_account(self, name: str, quota_bytes: int | None) -> tuple[str, Account]:
        """A new account, under ``name`` and a number if that is taken."""
        self.drain()
        names = [name, *(f"{name} {number}" for number in range(2, len(self.accounts) + 2))]
        name = next(free for free in names if free not in self.accounts)
        account = self.accounts[name] = Account(quota_bytes)
        self.retains = True
        return name, account

    def take(self, size_bytes: int, account: Account) -> Range[Fence] | None:
        """Lends from what is free."""
        self.drain()
        rounded_bytes = rounded_up(size_bytes, ALIGNMENT_BYTES)
        taken = self._free_ranges.take(rounded_bytes)
        if taken is not None:
            self.leased_bytes += rounded_bytes
            self.requested_bytes += size_bytes
            self.peak_leased_bytes = max(self.peak_leased_bytes, self.leased_bytes)
            self.recent_peak_bytes = max(self.recent_peak_bytes, self.leased_bytes)
            account.lend(size_bytes, rounded_bytes)
        return taken

    def add(self, region: int, slab: Slab) -> None:
        """The pool has a slab more."""
        self._free_ranges.add(region, slab.start, slab.end)

    def free_below(self, top: int) -> int:
        """Bytes that are free right below the address ``top``."""
        return self._free_ranges.free_before(top)

    def cut(self, slabs: list[Slab], excess_bytes: int) -> tuple[list[Slab], tuple[Fence, ...]]:
        """Takes away those of ``slabs`` that are wholly free, the last first, until ``excess_bytes`` are gone.

        Returns them and the fences of their last uses.
        """
        self.drain()
        cut: list[Slab] = []
        fences: tuple[Fence, ...] = ()
        for slab in reversed(slabs):
            if excess_bytes <= 0:
                break
            free = self._free_ranges.cut(slab.start, slab.end)
            if free is not None:
                cut.append(slab)
                fences += free.marks
                excess_bytes -= slab.size_bytes
        self.recent_peak_bytes = self.leased_bytes
        return cut, latest(fences)

    def drain(self) -> None:
        """Does what the notes in the inbox say."""
        while self.inbox:
            note = self.inbox.popleft()
            if isinstance(note, str):
                del self.accounts[note]
                self.retains = bool(self.accounts)
                continue
            lease, fences = note
            taken, lease.taken = lease.taken, None
            if taken is not None:  # else it was given back before
                rounded_bytes = taken.end - taken.start
                self._free_ranges.put(taken, tuple([fence for fence in fences if fence is not None]))
                self.leased_bytes -= rounded_bytes
                self.requested_bytes -= lease.size_bytes
                lease.account.settle(lease.size_bytes, rounded_bytes)


class Allocator:
    """What one pool holds: its lease table, and its source of slabs."""

    def __init__(self, slab_source: SlabSource) -> None:
        self.slab_source = slab_source
        self.leases = LeaseTable()
        self.system = threading.Lock()
        self.hits = 0
        """Leases that needed no new slab."""
        self.waited_s = 0.0
        """Time that leases waited for new slabs."""
        self.last_lease_s = time.monotonic()

    def lease(self, size_bytes: int, account: Account) -> Lease | None:
        """Lends from what is free, else from a new slab; ``None`` if there is to be none."""
        with self.leases.lock:
            lease = self._take(size_bytes, account)
            self.hits += lease is not None
        if lease is None:
            begin = time.perf_counter()
            with self.system:  # the housekeeping thread may be adding a slab just now
                lease = self._take_from_system(size_bytes, account)
            self.waited_s += time.perf_counter() - begin
            account.refused_leases += lease is None
        return lease

    def grow(self, wanted_bytes: Callable[[], int]) -> bool | None:
        """Adds a slab ahead of need; false if none is wanted (asked while nobody else grows), None if it is refused."""
        with self.system:
            size_bytes = min(wanted_bytes(), LARGEST_SLAB_BYTES)
            return size_bytes >= PAGE_BYTES and (self._grow(size_bytes, 0) or None)

    def free(self, keep_bytes: int = 0) -> int:
        """Gives free slabs back, after their last uses, until ``keep_bytes`` are held; returns their bytes."""
        with self.system:
            return self._free(keep_bytes)

    def publish(self) -> bool:
        """Tells the node what is on lease; returns whether someone wants back what this pool borrows."""
        with self.system:
            held_bytes = self.slab_source.held_bytes
            return held_bytes > 0 and self.slab_source.budget.publish(held_bytes, self.leases.leased_bytes)

    def free_if_unused(self, wait_s: float = 0.0) -> None:
        """Gives back what can be if there is no user; at the latest the housekeeping thread does.

        A finalizer must not wait: its own thread may be dealing with the system.
        """
        if not self.leases.retains and self.system.acquire(timeout=wait_s):
            try:
                if self.slab_source.held_bytes:
                    self._free(0)
                if not self.slab_source.held_bytes:
                    self.slab_source.budget.leave()
            finally:
                self.system.release()

    def _take(self, size_bytes: int, account: Account) -> Lease | None:
        taken = self.leases.take(size_bytes, account)
        if taken is None:
            return None
        self.last_lease_s = time.monotonic()
        region = self.slab_source.regions[taken.region]
        offset = taken.start - taken.region
        memory = region.memory[offset : offset + size_bytes]
        borders = region.borders(taken.start, taken.start + size_bytes)
        return Lease(self.leases.inbox, memory, taken, account, borders)

    def _take_from_system(self, size_bytes: int, account: Account) -> Lease | None:
        while True:
            with self.leases.lock:
                lease = self._take(size_bytes, account)
                free_bytes = self.leases.free_below(self.slab_source.top)
            if lease is not None or not self._grow(size_bytes, free_bytes):
                return lease

    def _grow(self, size_bytes: int, free_below_top_bytes: int) -> bool:
        grown = self.slab_source.grow(size_bytes, free_below_top_bytes)
        if grown is not None:
            with self.leases.lock:
                self.leases.add(*grown)
        return grown is not None

    def _free(self, keep_bytes: int) -> int:
        slab_source = self.slab_source
        slabs = [slab for region in slab_source.regions.values() for slab in region.slabs]
        with self.leases.lock:
            cut, fences = self.leases.cut(slabs, slab_source.held_bytes - keep_bytes)
        for fence in fences:
            with contextlib.suppress(RuntimeError):  # the device has failed: nothing runs there any more
                fence.event.synchronize()  # a copy may still read or write the memory
        slab_source.release(cut)
        return sum(slab.size_bytes for slab in cut)
