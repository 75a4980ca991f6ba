"""This rank's host memory: a tensor leases its block here before it is copied out, and gives it back when it has died.

Memory comes from the system in slabs, which are kept from step to step; :mod:`~ds_fgoffload.arena` knows what is free
in them. A block carries the fences of its last uses: its next user waits for them on the device, so that nothing waits
on the host. Only :meth:`HostPool.trim`, and what frees slabs like it, blocks the host.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from deepspeed.utils import logger

from ds_fgoffload.arena import ALIGNMENT_BYTES, Arena, Range, slab_sizes
from ds_fgoffload.errors import OffloadConfigError, OffloadStateError
from ds_fgoffload.host_limit import share_bytes
from ds_fgoffload.streams import Fence, accelerator_device, allocate_host, latest, unpin_unused_host


@dataclass(frozen=True)
class HostPoolSettings:
    """What the user decides about the pool. Raises ``OffloadConfigError`` for a negative limit."""

    max_bytes: int | None = None
    """Most bytes held from the system, free ones included. ``None``: this rank's share of half of what is available."""
    pin_memory: bool = True
    """Whether slabs are page-locked. Pageable memory is several times slower to copy, and the copies block the host."""

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes < 0:
            raise OffloadConfigError(
                f"host_pool.max_bytes is {self.max_bytes}, less than 0: give more, or leave it unset"
            )


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


class Lease:
    """The loan of ``size_bytes`` of host memory. Not given back by itself: only its user knows the last uses."""

    __slots__ = ("_inbox", "_memory", "fences", "size_bytes", "taken")

    def __init__(self, inbox: deque[_Note], memory: torch.Tensor, taken: Range[Fence] | None) -> None:
        self.size_bytes = memory.numel()
        self.fences: tuple[Fence, ...] = () if taken is None else taken.marks
        """The writer of this block waits for them, on the device, before its first write."""
        self._inbox = inbox
        self._memory: torch.Tensor | None = memory
        self.taken = taken
        """What the pool knows the block by, until it has read that the block was given back."""

    @property
    def memory(self) -> torch.Tensor:
        """The block: uint8, one-dimensional. Raises ``OffloadStateError`` after :meth:`give_back`."""
        if self._memory is None:
            raise OffloadStateError(f"a host block of {self.size_bytes} bytes was given back: use it before that")
        return self._memory

    def give_back(self, *fences: Fence | None) -> None:
        """Ends the loan; ``fences`` are the last uses on the device. Later calls do nothing.

        May be called by the garbage collector at any moment, also inside one of the pool's locked methods on the same
        thread. So it only leaves a note, which the pool reads at its next lease, stats, trim or close.
        """
        self._memory = None
        self._inbox.append((self, fences))


_Note = tuple[Lease, tuple[Fence | None, ...]] | None  # None: a user has gone


class HostPool:
    """Leases pinned host memory. Thread-safe.

    ``allocate(size_bytes, pinned)`` takes a slab from the system, and raises ``RuntimeError`` or ``MemoryError`` if it
    is refused. ``slab_bytes`` (a power of two, else ``ValueError``) is the least that is asked for; by default 256 MiB
    where memory is pinned for an accelerator, else 16 MiB.
    """

    def __init__(
        self,
        settings: HostPoolSettings | None = None,
        *,
        allocate: Callable[[int, bool], torch.Tensor] = lambda size, pinned: allocate_host(size, pinned=pinned),
        slab_bytes: int | None = None,
    ) -> None:
        if slab_bytes is not None and (slab_bytes < ALIGNMENT_BYTES or slab_bytes & (slab_bytes - 1)):
            raise ValueError(f"slab_bytes is {slab_bytes}, but a power of two of at least {ALIGNMENT_BYTES} is needed")
        self.last_refusal: str | None = None
        """Why the latest lease that was refused was refused, and the remedy; ``None`` if none ever was."""
        self._allocate = allocate
        self._slab_bytes = slab_bytes
        self._settings = settings or HostPoolSettings()
        self._limit = share_bytes() if self._settings.max_bytes is None else self._settings.max_bytes
        self._lock = threading.Lock()
        self._inbox: deque[_Note] = deque()
        self._arena: Arena[Fence] = Arena(merge=latest)
        self._slabs: dict[int, torch.Tensor] = {}
        self._users = 0
        self._retains = True  # False between the going of the last user and the coming of the next
        self._pinned = self._leased = self._peak_leased = self._requested = 0
        self._allocations = self._hits = self._refused_allocations = 0

    def configure(self, settings: HostPoolSettings) -> None:
        """Applies ``settings`` to growth from now on; a user calls it before :meth:`add_user`.

        What is already held stays, even beyond a lower limit. Warns if other users are active and had chosen otherwise.
        """
        with self._lock:
            self._drain()
            old, self._settings = self._settings, settings
            if self._users and old.max_bytes not in (None, settings.max_bytes):
                asked = "an automatic limit" if settings.max_bytes is None else f"{settings.max_bytes} bytes"
                logger.warning(
                    f"host_pool.max_bytes was {old.max_bytes} bytes for an engine that is still active, and is {asked} "
                    "from now on: all engines of a process share one pool; give them the same value"
                )
            if old.pin_memory != settings.pin_memory:
                self._free_empty_slabs()
                if self._pinned:
                    logger.warning(
                        f"host_pool.pin_memory was {old.pin_memory} and is {settings.pin_memory} from now on: "
                        f"{self._pinned} bytes in use stay as they are; give all engines of a process the same value"
                    )
            if settings.max_bytes is not None:
                self._limit = settings.max_bytes
            elif old.max_bytes is not None or not self._users:  # with users, an automatic limit is known and was logged
                self._limit = self._pinned + share_bytes()
                logger.info(f"host_pool.max_bytes is unset: this rank takes at most {_mib(self._limit)} of host memory")

    def add_user(self) -> None:
        """Someone will lease from now on; slabs are kept for reuse as long as there is a user."""
        with self._lock:
            self._users += 1
            self._retains = True

    def remove_user(self) -> None:
        """Undoes one :meth:`add_user`. May be called by a finalizer, like :meth:`Lease.give_back`.

        With the last user go the slabs without leases, at once (or at the pool's next call, if it is amid one now); the
        others at the first call of lease, stats, trim or close after their leases.
        """
        self._inbox.append(None)
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def lease(self, size_bytes: int) -> Lease | None:
        """Lends ``size_bytes``; ``None`` beyond the limit or if the system refuses (:attr:`last_refusal` says which).

        Zero bytes are always lent and take no memory. Raises ``ValueError`` for a negative size.
        """
        if size_bytes <= 0:
            if size_bytes < 0:
                raise ValueError(f"a lease of {size_bytes} bytes was asked for, but 0 or more is allowed")
            return Lease(self._inbox, torch.empty(0, dtype=torch.uint8), None)
        rounded = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._lock:
            self._drain()
            taken = self._arena.take(rounded)
            if taken is not None:
                self._hits += 1
            elif self._grow(size_bytes):
                taken = self._arena.take(rounded)
            if taken is None:
                return None
            self._leased += rounded
            self._requested += size_bytes
            self._peak_leased = max(self._peak_leased, self._leased)
            offset = taken.start - taken.slab
            return Lease(self._inbox, self._slabs[taken.slab][offset : offset + size_bytes], taken)

    def stats(self) -> HostPoolStats:
        """The figures of this moment."""
        with self._lock:
            self._drain()
            return HostPoolStats(
                pinned_bytes=self._pinned,
                leased_bytes=self._leased,
                peak_leased_bytes=self._peak_leased,
                requested_bytes=self._requested,
                limit_bytes=self._limit,
                allocations=self._allocations,
                hits=self._hits,
                refused_allocations=self._refused_allocations,
            )

    def trim(self) -> int:
        """Gives slabs without leases back to the system, after their last uses (a host wait); returns their bytes."""
        with self._lock:
            self._drain()
            return self._free_empty_slabs()

    def close(self) -> None:
        """Trims, and raises ``OffloadStateError`` if leases are alive; they stay valid, and so does the pool."""
        with self._lock:
            self._drain()
            self._free_empty_slabs()
            if self._leased:
                raise OffloadStateError(
                    f"{self._leased} bytes of the host pool are leased at close(), {self._pinned} stay pinned for it: "
                    "let go of the losses and outputs whose backward has not run, then close again"
                )

    def _drain(self) -> None:  # the lock is held here and below
        """Does what the notes in the inbox say."""
        while self._inbox:
            note = self._inbox.popleft()
            if note is None:
                self._users -= 1
                assert self._users >= 0, "remove_user() without add_user()"
                self._retains = self._users > 0
                continue
            lease, fences = note
            taken, lease.taken = lease.taken, None
            if taken is not None:  # else it was given back before
                self._arena.put(taken, tuple([fence for fence in fences if fence is not None]))
                self._leased -= taken.end - taken.start
                self._requested -= lease.size_bytes
        if not self._retains:
            self._free_empty_slabs()

    def _grow(self, size: int) -> bool:
        """Adds a slab with room for ``size``; if none is to be had, ``last_refusal`` says why."""
        pin = self._settings.pin_memory
        least = self._slab_bytes or (256 << 20 if pin and accelerator_device().type != "cpu" else 16 << 20)
        cause, remedy = "the host pool is full", "raise host_pool.max_bytes or offload less"
        for slab in slab_sizes(size, least=least, held=self._pinned, limit=self._limit):
            try:
                memory = self._allocate(slab, pin)
            except (RuntimeError, MemoryError) as error:  # noqa: PERF203 - two turns at most
                self._refused_allocations += 1
                cause = f"the system refused {_mib(slab)} of host memory ({type(error).__name__}: {error})"
                remedy = "lower host_pool.max_bytes or free host memory"
                remedy += ", raise the limit of locked memory (ulimit -l), or set pin_memory to false" if pin else ""
            else:
                self._slabs[self._arena.add_slab(slab)] = memory
                self._pinned += slab
                self._allocations += 1
                return True
        self.last_refusal = (
            f"{cause}: {_mib(size)} asked for, no free range holds them, and {_mib(self._pinned)} are pinned "
            f"(leased: {_mib(self._leased)}) of {_mib(self._limit)} allowed; {remedy}"
        )
        return False

    def _free_empty_slabs(self) -> int:
        empty = self._arena.empty_slabs()
        for fence in latest(tuple(fence for slab in empty for fence in slab.marks)):
            fence.event.synchronize()  # a copy may still read or write the memory
        for slab in empty:
            self._arena.remove_slab(slab.start)
            del self._slabs[slab.start]
        freed = sum(slab.end - slab.start for slab in empty)
        self._pinned -= freed
        if freed:
            unpin_unused_host()
        return freed


def _mib(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({size_bytes / 2**20:.1f} MiB)"


_POOL = HostPool()


def host_pool() -> HostPool:
    """The one pool of this process, shared by all its engines."""
    return _POOL
