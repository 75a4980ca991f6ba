"""The books of the host pool: what is free, what is on lease, and to whom. In memory alone, and never waiting."""

from __future__ import annotations

import threading
from collections import deque

from ds_fgoffload.arena import ALIGNMENT_BYTES, Arena, Range, rounded_up
from ds_fgoffload.lease import Account, Note
from ds_fgoffload.region import Slab
from ds_fgoffload.streams import Fence, latest


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
