"""The books and the supply together: blocks out of slabs, and slabs from the system and back. Thread-safe.

Two locks: that of the books is held for microseconds, and ``system`` by whoever deals with the system, which may take
long. Nobody who holds the first waits for the second.


The books of the host pool: what is free, what is on lease, and to whom. In memory alone, and never waiting.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from ds_fgoffload.device.streams import Fence, latest
from ds_fgoffload.host_memory.free_ranges import ALIGNMENT_BYTES, LARGEST_SLAB_BYTES, Arena, Range, rounded_up
from ds_fgoffload.host_memory.lease import Account, Lease, Note
from ds_fgoffload.host_memory.slabs import PAGE_BYTES, Slab, Supply


class Books:
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
        self._arena: Arena[Fence] = Arena(merge=latest)

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
        taken = self._arena.take(rounded_bytes)
        if taken is not None:
            self.leased_bytes += rounded_bytes
            self.requested_bytes += size_bytes
            self.peak_leased_bytes = max(self.peak_leased_bytes, self.leased_bytes)
            self.recent_peak_bytes = max(self.recent_peak_bytes, self.leased_bytes)
            account.lend(size_bytes, rounded_bytes)
        return taken

    def add(self, region: int, slab: Slab) -> None:
        """The pool has a slab more."""
        self._arena.add(region, slab.start, slab.end)

    def free_below(self, top: int) -> int:
        """Bytes that are free right below the address ``top``."""
        return self._arena.free_before(top)

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
            free = self._arena.cut(slab.start, slab.end)
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
                self._arena.put(taken, tuple([fence for fence in fences if fence is not None]))
                self.leased_bytes -= rounded_bytes
                self.requested_bytes -= lease.size_bytes
                lease.account.settle(lease.size_bytes, rounded_bytes)


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
