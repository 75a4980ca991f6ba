"""Takes slabs from the system within the budget, and gives them back: the host pool's only way to memory.

Slabs lie side by side in a region, one stretch of address space. They have the size that was asked for, where torch's
pinned allocator would round it up to a power of two. Several threads touch their pages, on the device's side of the
machine where the system tells which that is; then the slab is registered with the device as a whole, because
page-locking memory that is there already takes least time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.utils import logger

from ds_fgoffload.device.pinning import allocate_pinned, pci_address, register_host, unpin_unused_host, unregister_host
from ds_fgoffload.host_memory.budget import Budget, HostPoolSettings, Refusal, mib, pin_remedy
from ds_fgoffload.host_memory.free_ranges import rounded_up, slab_sizes

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20
_MADV_DONTFORK, _MADV_DONTDUMP, _MADV_HUGEPAGE, _MADV_DONTNEED = 10, 16, 14, 4
_MAP_NORESERVE = 0x4000
_TOUCHED_BY_ONE_BYTES = 8 << 20
_MOST_TOUCHING_THREADS = 32

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Slab(NamedTuple):
    """Bytes ``start`` to ``end`` that were taken from the system together; addresses as in the free ranges."""

    start: int
    end: int
    registered: bool
    """Whether it was page-locked for the device by :func:`~ds_fgoffload.device.pinning.register_host`."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


class Region:
    """Address space from ``base`` on, of which slabs are taken from its beginning upwards."""

    def __init__(self, base: int, memory: torch.Tensor, slabs: list[Slab] | None = None) -> None:
        self.base = base
        self.memory = memory
        """All of it: uint8, one-dimensional. What lies in no slab reads as zeros, and takes memory when written."""
        self.end = base + memory.numel()
        self.slabs = slabs or []
        self.is_mapped = not self.slabs
        """Or else it was made by the accelerator, which takes it back with the last view of it."""
        self._starts = [slab.start for slab in self.slabs]
        self._registered = 0

    @classmethod
    def reserve(cls, base: int, size_bytes: int, least_bytes: int) -> Region:
        """Address space alone, which takes no memory: ``size_bytes``, or what the system grants of it.

        Raises ``MemoryError`` if it does not grant ``least_bytes``.
        """
        mapped = _mapped(size_bytes, least_bytes)
        # The tensor keeps the mapping alive, and its last view takes it away.
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        address = memory.data_ptr()
        _advise(address, memory.numel(), _MADV_DONTFORK)  # a data loader's fork would copy every pinned page
        _advise(address, memory.numel(), _MADV_DONTDUMP)
        skipped = -address % HUGE_PAGE_BYTES
        return cls(base, memory[skipped : memory.numel() - HUGE_PAGE_BYTES + skipped])

    @classmethod
    def of(cls, base: int, memory: torch.Tensor) -> Region:
        """One slab that the accelerator has page-locked itself."""
        return cls(base, memory, [Slab(base, base + memory.numel(), registered=False)])

    @property
    def top(self) -> int:
        """Where the next slab begins."""
        return self.slabs[-1].end if self.slabs else self.base

    def extend(self, size_bytes: int, *, pin: bool) -> bool:
        """Adds a slab at the top; false if the accelerator registers no memory that it has not made.

        Raises ``MemoryError`` or ``RuntimeError`` if the system refuses; then nothing has changed.
        """
        start = self.top
        address = self._address(start)
        _advise(address, size_bytes, _MADV_HUGEPAGE)  # for the slab alone: no page may reach beyond it
        try:
            touch(address, size_bytes)
            registered = register_host(address, size_bytes) if pin else True
        except BaseException:
            _advise(address, size_bytes, _MADV_DONTNEED)
            raise
        if registered:
            self._starts = [*self._starts, start]  # a new list: whoever leases reads it meanwhile
            self._registered += pin
            self.slabs.append(Slab(start, start + size_bytes, registered=pin))
        else:
            _advise(address, size_bytes, _MADV_DONTNEED)
        return registered

    def release(self, slab: Slab) -> None:
        """Gives the slab's memory back to the system; nobody uses it any more, nor does the device."""
        address = self._address(slab.start)
        if slab.registered:
            unregister_host(address)
        if self.is_mapped:
            _advise(address, slab.size_bytes, _MADV_DONTNEED)
        self._registered -= slab.registered
        self.slabs.remove(slab)
        self._starts = [kept.start for kept in self.slabs]

    def borders(self, start: int, end: int) -> tuple[int, ...]:
        """Where slabs end between ``start`` and ``end``, counted from ``start``, if any is registered.

        No copy of the device may reach from one registration into another.
        """
        starts = self._starts
        first = bisect_right(starts, start)
        if first == len(starts) or starts[first] >= end or not self._registered:
            return ()
        return tuple(border - start for border in starts[first:] if border < end)

    def _address(self, start: int) -> int:
        return self.memory.data_ptr() + start - self.base


def _mapped(size_bytes: int, least_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    sizes = [size_bytes]
    while sizes[-1] > 2 * max(least_bytes, HUGE_PAGE_BYTES):
        sizes.append(rounded_up(sizes[-1] // 2, HUGE_PAGE_BYTES))
    for size in [*sizes, rounded_up(least_bytes, HUGE_PAGE_BYTES)]:
        with contextlib.suppress(OSError):
            return mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=flags)
    raise MemoryError(f"no address space for {least_bytes} bytes of host memory (ulimit -v, vm.overcommit_memory)")


def touch(address: int, size_bytes: int) -> None:
    """Has the system put pages there, by several threads that write zeros.

    Not by ``MADV_POPULATE_WRITE``: sixteen threads of one process came to 6 GiB/s with it, no more than four, and to 39
    when they wrote (Linux 6.18, huge pages).
    """
    threads = min(_touching_threads(), -(-size_bytes // _TOUCHED_BY_ONE_BYTES))
    part = rounded_up(-(-size_bytes // threads), HUGE_PAGE_BYTES)
    near = near_processors()  # here, as a new thread has another current device
    workers = [
        threading.Thread(target=_touch, args=(address + offset, min(part, size_bytes - offset), near))
        for offset in range(part, size_bytes, part)
    ]
    for worker in workers:
        worker.start()
    _touch(address, min(part, size_bytes), near)
    for worker in workers:
        worker.join()


def _touch(address: int, size_bytes: int, near: frozenset[int]) -> None:
    with _on_processors(near):  # pages come from the memory next to the processor that touches them first
        ctypes.memset(address, 0, size_bytes)  # other Python threads run meanwhile


@contextlib.contextmanager
def _on_processors(processors: frozenset[int]) -> Iterator[None]:
    """This thread runs on ``processors`` meanwhile; if there are none, wherever it may."""
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@functools.cache
def near_processors(root: Path = Path("/sys")) -> frozenset[int]:
    """The processors next to the device that this process may use; none if the system does not tell, or all are."""
    allowed = os.sched_getaffinity(0)
    address = pci_address()
    if address is None:
        return frozenset()
    try:
        text = (root / f"bus/pci/devices/{address}/local_cpulist").read_text().strip()
    except OSError:
        return frozenset()
    near: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        near |= set(range(int(first), int(last or first) + 1))
    return frozenset() if allowed <= near else frozenset(near & allowed)


def _touching_threads() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(_MOST_TOUCHING_THREADS, len(os.sched_getaffinity(0)) // max(ranks, 1)))


def _advise(address: int, size_bytes: int, advice: int) -> None:
    _libc.madvise(address, size_bytes, advice)  # where the kernel does not know the advice, nothing is lost


MOST_ADDRESS_SPACE_BYTES = 4 << 40
RETRY_AFTER_S = 1.0
"""Seconds before the system is asked again for what it refused: asking takes time, also in a step."""


class SlabSource:
    """The slabs of one pool. Not thread-safe, but its figures may be read at any time.

    ``slab_bytes`` is the least that is asked for at once, a multiple of the page size.
    """

    def __init__(self, settings: HostPoolSettings, budget: Budget, slab_bytes: int) -> None:
        self.settings = settings
        self.budget = budget
        self.regions: dict[int, Region] = {}
        """By base; the last is the one that grows."""
        self.held_bytes = self.pageable_bytes = 0
        self.allocations = self.refused_allocations = 0
        self.pinning_s = 0.0
        self.last_refusal: str | None = None
        """Why the latest slab was refused, and the remedy."""
        self._slab_bytes = slab_bytes
        self._next_base = 0
        self._pageable: set[int] = set()  # starts of slabs that should have been page-locked
        self._accelerator_allocates = False
        self._warned_of_pin_failure = False
        self._quiet_until_s, self._refused_bytes, self._refusal = 0.0, 0, budget.full

    @property
    def top(self) -> int:
        """Where the next slab will begin if the region has room for it; ``-1`` before the first."""
        return next(reversed(self.regions.values())).top if self.regions else -1

    def grow(self, size_bytes: int, free_below_top_bytes: int) -> tuple[int, Slab] | None:
        """One slab more, so that ``size_bytes`` in a row are free; its region, and the slab.

        ``free_below_top_bytes`` are free right below :attr:`top`. ``None`` if it is refused (:attr:`last_refusal`).
        """
        missing = size_bytes - free_below_top_bytes
        region = next(reversed(self.regions.values()), None)
        if region is None or not region.is_mapped or region.end - region.top < missing:
            region, missing = None, size_bytes
        attempts = [(slab_bytes, self.settings.pin_memory) for slab_bytes in self._sizes(missing)]
        refusal = self.budget.full
        if attempts and attempts[-1][0] >= self._refused_bytes and time.monotonic() < self._quiet_until_s:
            attempts, refusal = [], self._refusal
        while attempts:
            slab_bytes, pin = attempts.pop(0)
            held_back = self.budget.claim(self.held_bytes, slab_bytes)
            if held_back is not None:
                refusal = held_back
                continue
            begin = time.perf_counter()
            try:
                return self._take(region, slab_bytes, pin=pin)
            except (RuntimeError, MemoryError) as error:
                self.refused_allocations += 1
                self.budget.holds(self.held_bytes)
                refusal = self._refused_by_system(slab_bytes, error, pin=pin)
                if not attempts:
                    if pin and self.settings.on_pin_failure == "pageable":
                        attempts.append((slab_bytes, False))
                    else:
                        self._quiet_until_s = time.monotonic() + RETRY_AFTER_S
                        self._refused_bytes, self._refusal = slab_bytes, refusal
            finally:
                self.pinning_s += time.perf_counter() - begin
        self.last_refusal = (
            f"{refusal.cause}: {mib(size_bytes)} asked for, no free range holds them, and {mib(self.held_bytes)} are "
            f"held of {mib(self.budget.limit_bytes)} allowed; {refusal.remedy}"
        )
        return None

    def release(self, slabs: list[Slab]) -> None:
        """Gives back slabs that nobody uses any more, neither here nor on the device."""
        unpin = False
        for slab in slabs:
            region = next(region for region in self.regions.values() if region.base <= slab.start < region.end)
            region.release(slab)
            self.held_bytes -= slab.size_bytes
            if slab.start in self._pageable:
                self._pageable.remove(slab.start)
                self.pageable_bytes -= slab.size_bytes
            if not region.slabs:
                del self.regions[region.base]
                unpin |= not region.is_mapped
        if unpin:
            del region
            unpin_unused_host()
        if slabs:
            self._quiet_until_s = 0.0
            self.budget.holds(self.held_bytes)

    def _sizes(self, missing: int) -> list[int]:
        huge = self._slab_bytes % HUGE_PAGE_BYTES == 0
        held, limit = self.held_bytes, self.budget.limit_bytes
        page = HUGE_PAGE_BYTES if huge else PAGE_BYTES
        sizes = slab_sizes(missing, least=self._slab_bytes, page=page, held=held, limit=limit)
        return sizes or slab_sizes(missing, least=PAGE_BYTES, page=PAGE_BYTES, held=held, limit=limit)

    def _take(self, region: Region | None, slab_bytes: int, *, pin: bool) -> tuple[int, Slab]:
        if pin and self._accelerator_allocates:
            region = self._allocated(slab_bytes)
        else:
            region = region or self._reserve(slab_bytes)
            try:
                extended = region.extend(min(slab_bytes, region.end - region.top), pin=pin)
            finally:
                if not region.slabs:
                    del self.regions[region.base]
            if not extended:
                self._accelerator_allocates = True
                region = self._allocated(slab_bytes)
        slab = region.slabs[-1]
        if self.settings.pin_memory and not pin:
            self._pageable.add(slab.start)
            self.pageable_bytes += slab.size_bytes
        self.held_bytes += slab.size_bytes
        self.allocations += 1
        return region.base, slab

    def _allocated(self, slab_bytes: int) -> Region:
        return self._add(Region.of(self._next_base, allocate_pinned(slab_bytes)))

    def _reserve(self, slab_bytes: int) -> Region:
        """Address space for all that may be taken yet."""
        most = min(self.budget.limit_bytes - self.held_bytes, MOST_ADDRESS_SPACE_BYTES)
        size_bytes = rounded_up(max(most, slab_bytes), HUGE_PAGE_BYTES)
        return self._add(Region.reserve(self._next_base, size_bytes, slab_bytes))

    def _add(self, region: Region) -> Region:
        self.regions[region.base] = region
        self._next_base = region.end + PAGE_BYTES  # the gap: nothing is joined across regions
        return region

    def _refused_by_system(self, slab_bytes: int, error: Exception, *, pin: bool) -> Refusal:
        pin_failed = pin and not isinstance(error, MemoryError)
        verb = "page-lock" if pin_failed else "give"
        remedy = "free host memory or lower host_pool.max_bytes"
        if pin_failed:
            remedy = f"{pin_remedy()}, or set host_pool.pin_memory to false"
        cause = f"the system refused to {verb} {mib(slab_bytes)} of host memory ({type(error).__name__}: {error})"
        if pin_failed and not self._warned_of_pin_failure:
            self._warned_of_pin_failure = True
            instead = "is pageable, and slow to copy" if self.settings.on_pin_failure == "pageable" else "is not used"
            logger.warning(f"{cause}; memory that cannot be page-locked {instead}. To mend it: {remedy}")
        return Refusal(cause, remedy)
