"""The books and the supply together: blocks out of slabs, and slabs from the system and back. Thread-safe.

Two locks: that of the books is held for microseconds, and ``system`` by whoever deals with the system, which may take
long. Nobody who holds the first waits for the second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from ds_fgoffload.arena import LARGEST_SLAB_BYTES
from ds_fgoffload.books import Books
from ds_fgoffload.lease import Account, Lease
from ds_fgoffload.region import PAGE_BYTES
from ds_fgoffload.supply import Supply


class Stock:
    """What one pool holds."""

    def __init__(self, supply: Supply) -> None:
        self.supply = supply
        self.books = Books()
        self.system = threading.Lock()
        self.hits = 0
        """Leases that needed no new slab."""
        self.waited_s = 0.0
        """Time that leases waited for new slabs."""
        self.last_lease_s = time.monotonic()

    def lease(self, size_bytes: int, account: Account) -> Lease | None:
        """Lends from what is free, else from a new slab; ``None`` if there is to be none."""
        with self.books.lock:
            lease = self._take(size_bytes, account)
            self.hits += lease is not None
        if lease is None:
            begin = time.perf_counter()
            with self.system:  # the keeper may be adding a slab just now
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
            held_bytes = self.supply.held_bytes
            return held_bytes > 0 and self.supply.budget.publish(held_bytes, self.books.leased_bytes)

    def free_if_unused(self, wait_s: float = 0.0) -> None:
        """Gives back what can be if there is no user; at the latest the keeper does.

        A finalizer must not wait: its own thread may be dealing with the system.
        """
        if not self.books.retains and self.system.acquire(timeout=wait_s):
            try:
                if self.supply.held_bytes:
                    self._free(0)
                if not self.supply.held_bytes:
                    self.supply.budget.leave()
            finally:
                self.system.release()

    def _take(self, size_bytes: int, account: Account) -> Lease | None:
        taken = self.books.take(size_bytes, account)
        if taken is None:
            return None
        self.last_lease_s = time.monotonic()
        region = self.supply.regions[taken.region]
        offset = taken.start - taken.region
        memory = region.memory[offset : offset + size_bytes]
        borders = region.borders(taken.start, taken.start + size_bytes)
        return Lease(self.books.inbox, memory, taken, account, borders)

    def _take_from_system(self, size_bytes: int, account: Account) -> Lease | None:
        while True:
            with self.books.lock:
                lease = self._take(size_bytes, account)
                free_bytes = self.books.free_below(self.supply.top)
            if lease is not None or not self._grow(size_bytes, free_bytes):
                return lease

    def _grow(self, size_bytes: int, free_below_top_bytes: int) -> bool:
        grown = self.supply.grow(size_bytes, free_below_top_bytes)
        if grown is not None:
            with self.books.lock:
                self.books.add(*grown)
        return grown is not None

    def _free(self, keep_bytes: int) -> int:
        supply = self.supply
        slabs = [slab for region in supply.regions.values() for slab in region.slabs]
        with self.books.lock:
            cut, fences = self.books.cut(slabs, supply.held_bytes - keep_bytes)
        for fence in fences:
            with contextlib.suppress(RuntimeError):  # the device has failed: nothing runs there any more
                fence.event.synchronize()  # a copy may still read or write the memory
        supply.release(cut)
        return sum(slab.size_bytes for slab in cut)
