"""Memory from the system, slab by slab, side by side in one stretch of address space: where the host pool's bytes lie.

Slabs have the size that was asked for, where torch's pinned allocator would round it up to a power of two. Their pages
are touched by several threads, on the device's side of the machine where the system tells which that is, and then
registered with the device as a whole: page-locking memory that is there already is what takes least time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ds_fgoffload.arena import rounded_up
from ds_fgoffload.pinning import pci_address, register_host, unregister_host

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20
_MADV_DONTFORK, _MADV_DONTDUMP, _MADV_HUGEPAGE, _MADV_DONTNEED = 10, 16, 14, 4
_MAP_NORESERVE = 0x4000
_TOUCHED_BY_ONE_BYTES = 8 << 20
_MOST_TOUCHING_THREADS = 32

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Slab(NamedTuple):
    """Bytes ``start`` to ``end`` that were taken from the system together; addresses as in the arena."""

    start: int
    end: int
    registered: bool
    """Whether it was page-locked for the device by :func:`~ds_fgoffload.pinning.register_host`."""

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
