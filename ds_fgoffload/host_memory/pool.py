"""This rank's host memory: a tensor leases its block here before it is copied out, and gives it back when it has died.

Each engine leases through a :class:`PoolUser` of its own. Memory comes from the system in slabs, which are kept from
step to step. A block carries the fences of its last uses: its next user waits for them on the device, so that nothing
waits on the host in a step. Below this file :mod:`~ds_fgoffload.host_memory.allocator` lends,
:mod:`~ds_fgoffload.host_memory.free_ranges` knows what is free, :mod:`~ds_fgoffload.host_memory.slabs` deals with the
system, and :mod:`~ds_fgoffload.host_memory.housekeeping` does in the background what would take time in a step.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from deepspeed.utils import logger

from ds_fgoffload.device.streams import accelerator_device, accelerator_is_cpu, on_device
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.host_memory.allocator import Allocator
from ds_fgoffload.host_memory.budget import Budget, HostPoolSettings, mib
from ds_fgoffload.host_memory.housekeeping import HousekeepingThread
from ds_fgoffload.host_memory.lease import Account, Lease
from ds_fgoffload.host_memory.node_ledger import Ledger
from ds_fgoffload.host_memory.slabs import PAGE_BYTES, Region, SlabSource
from ds_fgoffload.text.messages import warn


@dataclass(frozen=True)
class HostPoolStats:
    """The pool at one moment. ``pinned`` is all that is held from the system, also where ``pin_memory`` is false."""

    pinned_bytes: int
    leased_bytes: int
    peak_leased_bytes: int
    requested_bytes: int
    """Leased bytes before they were rounded up to the alignment."""
    limit_bytes: int
    allocations: int
    refused_allocations: int
    """Slabs taken from the system, and those it refused; cumulative."""
    hits: int
    """Leases that needed no new slab, cumulative."""
    share_bytes: int = 0
    """What this rank may have without borrowing from others of the node."""
    pageable_bytes: int = 0
    """Of the pinned bytes, those that the system refused to page-lock."""
    pinning_ms: float = 0.0
    """Time in the system for new slabs, mostly in the background; cumulative."""
    waited_ms: float = 0.0
    """Time that leases waited for new slabs; cumulative."""
    engines: dict[str, Account] = field(default_factory=dict)
    """By the name of each engine or module that uses the pool."""


class _Pool(Protocol):
    @property
    def last_refusal(self) -> str | None: ...

    def lease(self, size_bytes: int, account: Account) -> Lease | None: ...

    def stats(self) -> HostPoolStats: ...

    def remove_user(self, name: str) -> None: ...


class PoolUser:
    """One engine's way to the pool: the same leases, on its own account."""

    def __init__(self, pool: _Pool, name: str, account: Account) -> None:
        self.name = name
        self.account = account
        self.last_refusal: str | None = None
        """Why the latest lease that was refused was refused, and the remedy; ``None`` if none ever was."""
        self._pool = pool
        self._is_there = True

    def lease(self, size_bytes: int) -> Lease | None:
        """As :meth:`~ds_fgoffload.host_memory.pool.HostPool.lease`, within this user's quota."""
        account, quota_bytes = self.account, self.account.quota_bytes
        if quota_bytes is not None and account.leased_bytes + size_bytes > quota_bytes:
            account.leased_bytes = self._pool.stats().engines[self.name].leased_bytes  # with what came back meanwhile
            if account.leased_bytes + size_bytes > quota_bytes:
                self.last_refusal = (
                    f"the host pool is full for {self.name}: {mib(size_bytes)} asked for, and it has "
                    f"{mib(account.leased_bytes)} of its {mib(quota_bytes)} on lease; raise host_pool.quota_bytes"
                )
                account.refused_leases += 1
                return None
        lease = self._pool.lease(size_bytes, account)
        if lease is None:
            self.last_refusal = self._pool.last_refusal
        return lease

    def leave(self) -> None:
        """Leases no more. May be called by a finalizer, like :meth:`Lease.give_back`; later calls do nothing."""
        if self._is_there:
            self._is_there = False
            self._pool.remove_user(self.name)


__all__ = ["HostPool", "HostPoolSettings", "HostPoolStats", "Lease", "PoolUser", "host_pool"]

SLAB_BYTES, CPU_SLAB_BYTES = 16 << 20, 2 << 20
AHEAD_DIVISOR = 32
"""The housekeeping thread takes memory when less than half of this fraction of the recent peak is free beyond it."""
HOUSEKEEPING_S = 1.0


class HostPool:
    """Leases pinned host memory. Thread-safe.

    Args:
        settings: bounds, and how memory is taken.
        ledger: where this pool and others of the node tell each other what they hold.
        slab_bytes: the least that is asked of the system at once, a multiple of the page size, else ``ValueError``.
            By default 16 MiB where memory is pinned for an accelerator, else 2 MiB.
        background: whether a thread takes memory ahead of need, and gives back what is idle.
    """

    def __init__(
        self,
        settings: HostPoolSettings | None = None,
        *,
        ledger: Ledger | None = None,
        slab_bytes: int | None = None,
        background: bool = True,
    ) -> None:
        if slab_bytes is not None and (slab_bytes < PAGE_BYTES or slab_bytes % PAGE_BYTES):
            raise ValueError(f"slab_bytes is {slab_bytes}, but a multiple of the page size ({PAGE_BYTES}) is needed")
        self._settings = settings or HostPoolSettings()
        self._ledger = ledger
        self._slab_bytes = slab_bytes
        self._background = background
        self._open()
        _pools.add(self)

    def _open(self) -> None:
        settings = self._settings
        default = SLAB_BYTES if settings.pin_memory and not accelerator_is_cpu() else CPU_SLAB_BYTES
        self._slab_source = SlabSource(settings, Budget(settings, self._ledger), self._slab_bytes or default)
        self._allocator = Allocator(self._slab_source)
        self._leases = self._allocator.leases
        self._own = Account()  # leases without an engine
        self._device: torch.device | None = None
        self._no_growth_until_s = 0.0  # after a refusal, no growth ahead of need is tried for a while
        self._housekeeping = HousekeepingThread(self._do_housekeeping) if self._background else None

    @property
    def last_refusal(self) -> str | None:
        """Why the latest lease that was refused was refused, and the remedy; ``None`` if none ever was."""
        return self._slab_source.last_refusal

    def configure(self, settings: HostPoolSettings) -> None:
        """Applies ``settings`` to growth from now on; a user calls it before :meth:`add_user`.

        What is already held stays, even beyond a lower limit. Warns if other users are active and had chosen otherwise.
        """
        old, slab_source, users = self._settings, self._slab_source, len(self._leases.accounts)
        for key in ("max_bytes", "node_max_bytes"):
            before, now = getattr(old, key), getattr(settings, key)
            if users and before not in (None, now):
                asked = "an automatic limit" if now is None else f"{now} bytes"
                logger.warning(
                    f"host_pool.{key} was {before} bytes for an engine that is still active, and is {asked} "
                    "from now on: all engines of a process share one pool; give them the same value"
                )
        if old.pin_memory != settings.pin_memory:
            self.trim()
            if slab_source.held_bytes:
                logger.warning(
                    f"host_pool.pin_memory was {old.pin_memory} and is {settings.pin_memory} from now on: "
                    f"{slab_source.held_bytes} bytes in use stay as they are; "
                    "give all engines of a process the same value"
                )
        with self._allocator.system:
            self._settings = slab_source.settings = settings
            how = slab_source.budget.set(settings, slab_source.held_bytes)
        if settings.max_bytes is None and settings.node_max_bytes is None and not users:
            logger.info(f"host_pool.max_bytes is unset: {how}")
        if note := slab_source.budget.less_ahead(settings.preallocate_bytes):
            warn(note)

    def add_user(self, name: str = "engine", quota_bytes: int | None = None) -> PoolUser:
        """Someone will lease from now on; slabs are kept for reuse as long as there is a user.

        ``name`` is completed by a number if it is taken; at most ``quota_bytes`` are lent to this user at once.
        """
        with self._leases.lock:
            name, account = self._leases.open_account(name, quota_bytes)
        self._wake_housekeeping()
        return PoolUser(self, name, account)

    def remove_user(self, name: str) -> None:
        """Undoes one :meth:`add_user`. May be called by a finalizer, like :meth:`Lease.give_back`.

        With the last user go the slabs without leases, at once (or at the pool's next call, if it is amid one now); the
        others at the first call of lease, stats, trim or close after their leases.
        """
        self._leases.inbox.append(name)
        if self._leases.lock.acquire(blocking=False):
            try:
                self._leases.drain()
            finally:
                self._leases.lock.release()
            self._allocator.free_if_unused()

    def lease(self, size_bytes: int, account: Account | None = None) -> Lease | None:
        """Lends ``size_bytes``; ``None`` beyond the limit or if the system refuses (:attr:`last_refusal` says which).

        Zero bytes are always lent and take no memory. Raises ``ValueError`` for a negative size.
        """
        account = account or self._own
        leases = self._leases
        if size_bytes <= 0:
            if size_bytes < 0:
                raise ValueError(f"a lease of {size_bytes} bytes was asked for, but 0 or more is allowed")
            return Lease(leases.inbox, torch.empty(0, dtype=torch.uint8), None, account)
        lease = self._allocator.lease(size_bytes, account)
        if leases.leased_bytes == leases.recent_peak_bytes:
            self._wake_housekeeping()
        if not leases.retains:
            self._allocator.free_if_unused()
        return lease

    def stats(self) -> HostPoolStats:
        """The figures of this moment."""
        leases, slab_source = self._leases, self._slab_source
        with leases.lock:
            leases.drain()
        self._allocator.free_if_unused(wait_s=1.0)
        with leases.lock:
            return HostPoolStats(
                pinned_bytes=slab_source.held_bytes,
                leased_bytes=leases.leased_bytes,
                peak_leased_bytes=leases.peak_leased_bytes,
                requested_bytes=leases.requested_bytes,
                limit_bytes=slab_source.budget.limit_bytes,
                allocations=slab_source.allocations,
                refused_allocations=slab_source.refused_allocations,
                hits=self._allocator.hits,
                share_bytes=slab_source.budget.share_bytes,
                pageable_bytes=slab_source.pageable_bytes,
                pinning_ms=slab_source.pinning_s * 1e3,
                waited_ms=self._allocator.waited_s * 1e3,
                engines={name: replace(account) for name, account in leases.accounts.items()},
            )

    def trim(self, keep_bytes: int = 0) -> int:
        """Gives slabs without leases back to the system, after their last uses (a host wait); returns their bytes.

        It stops when ``keep_bytes`` or less are held.
        """
        return self._allocator.free(keep_bytes)

    def close(self) -> None:
        """Trims, and raises ``OffloadStateError`` if leases are alive; they stay valid, and so does the pool."""
        self.trim()
        leased_bytes, held_bytes = self._leases.leased_bytes, self._slab_source.held_bytes
        if not held_bytes:
            with self._allocator.system:
                self._slab_source.budget.leave()
        if leased_bytes:
            raise OffloadStateError(
                f"{leased_bytes} bytes of the host pool are leased at close(), {held_bytes} stay pinned for it: "
                "let go of the losses and outputs whose backward has not run, then close again"
            )

    def _ahead_bytes(self) -> int:
        """How much should be taken now, ahead of need."""
        held, peak = self._slab_source.held_bytes, self._leases.recent_peak_bytes
        wanted = peak + peak // AHEAD_DIVISOR if held < peak + peak // (2 * AHEAD_DIVISOR) else 0
        if self._leases.accounts:
            wanted = max(wanted, min(self._settings.preallocate_bytes, self._slab_source.budget.ahead_bytes))
        wanted = min(wanted, self._slab_source.budget.limit_bytes)
        return wanted - held if self._leases.retains and time.monotonic() >= self._no_growth_until_s else 0

    def _wake_housekeeping(self) -> None:
        housekeeping = self._housekeeping
        if housekeeping is not None and (
            self._ahead_bytes() >= PAGE_BYTES or (self._has_duties() and not housekeeping.runs)
        ):
            if self._device is None:
                self._device = accelerator_device()  # that of the thread which trains
            housekeeping.wake()

    def _has_duties(self) -> bool:
        return self._slab_source.held_bytes > 0 and (self._ledger is not None or self._settings.idle_trim_s is not None)

    def _do_housekeeping(self) -> float | None:
        """The work of the housekeeping thread; returns the seconds until the next time, None if there is to be none."""
        with on_device(self._device):
            return self._do_housekeeping_on_device()

    def _do_housekeeping_on_device(self) -> float | None:
        while grown := self._allocator.grow(self._ahead_bytes):  # slab by slab: a lease may be waiting
            pass
        if grown is None:
            self._no_growth_until_s = time.monotonic() + HOUSEKEEPING_S
        if self._allocator.publish():
            self.trim(keep_bytes=self._slab_source.budget.share_bytes)
        idle_s = self._settings.idle_trim_s
        with self._leases.lock:
            self._leases.drain()
            is_idle = (
                idle_s is not None
                and not self._leases.leased_bytes
                and time.monotonic() - self._allocator.last_lease_s > idle_s
            )
        if is_idle:
            self.trim()
        self._allocator.free_if_unused()
        return HOUSEKEEPING_S if self._has_duties() else None

    def end(self) -> None:
        """The interpreter ends: gives back what can be, and leaves the ledger."""
        if self._housekeeping is not None:
            self._housekeeping.stop()
        with contextlib.suppress(Exception):
            self.trim()
        self._slab_source.budget.leave()

    def forget(self) -> None:
        """In a forked child: it does not have the memory, and must never unmap what may lie there later."""
        _abandoned.extend(self._slab_source.regions.values())
        if self._ledger is not None:
            self._ledger = Ledger(program=_program())
        self._open()


_pools: weakref.WeakSet[HostPool] = weakref.WeakSet()
_abandoned: list[Region] = []
_POOL: HostPool | None = None
_making = threading.Lock()


def host_pool() -> HostPool:
    """The one pool of this process, shared by all its engines."""
    global _POOL  # noqa: PLW0603 - made when it is first needed: it looks at the machine
    with _making:
        if _POOL is None:
            _POOL = HostPool(ledger=Ledger(program=_program()))
        return _POOL


def _program() -> str:
    return Path(sys.argv[0]).name if sys.argv else ""


def _end_all() -> None:
    for pool in list(_pools):
        pool.end()


def _forget_all() -> None:
    global _making  # noqa: PLW0603 - a thread of the parent may have held it
    _making = threading.Lock()
    for pool in list(_pools):
        pool.forget()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
