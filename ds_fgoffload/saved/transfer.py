"""The copies of one device, the waits that make them right, and the parcel: what travels in one copy.

A :class:`Parcel` is one large storage, or many small ones of a call, packed. It lives as long as a saved storage in it.
When the last one is gone, its device memory and its host block go back, whatever it was doing. Nothing else ends it,
neither a first use nor a step boundary.

:class:`Transfer` makes the copies. Every reader of memory comes after its writer, and every writer after the last
reader, on the device and on the host blocks, by waits between streams alone. Each wait below is needed: the tests take
them out one by one and see a wrong number or an access out of order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch

from ds_fgoffload.compat.private import foreach_copy, version_counter
from ds_fgoffload.device.streams import Fence, Streams, make_streams
from ds_fgoffload.host_memory.pool import Lease
from ds_fgoffload.profiling.recorder import Recorder
from ds_fgoffload.profiling.round_times import Direction
from ds_fgoffload.saved.tensors import WeakStorage, storage_bytes
from ds_fgoffload.stats import UnitStats


class Transfer:
    """Moves whole storages between the device and leased host blocks.

    One per attachment. The compute streams on which its tensors are saved and used, nearly always one, hand memory to
    each other: a tensor may be made on one, saved on a second, and let go of while a third is being filled. Autograd
    orders that by keeping the tensor until backward. Whoever lets go of it in forward must order it: all of them.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._computes: dict[Any, None] = {}  # a set that keeps its order
        self._last_compute: Any = self
        self.device = streams.device
        self.synchronous = streams.synchronous
        self.recorder = None if streams.synchronous else Recorder(streams, self.compute)

    def compute(self) -> Any:
        """The stream on which the caller's kernels are queued now."""
        compute = self._streams.compute()
        if compute is not self._last_compute:  # hashing a stream at every saved tensor would be slow
            self._computes[compute] = None
            self._last_compute = compute
        return compute

    def pack(self, parts: list[torch.Tensor], offsets: Sequence[int], size_bytes: int, compute: Any) -> torch.Tensor:
        """New device memory (uint8) of ``size_bytes``, with ``parts`` at ``offsets``: one kernel on ``compute``."""
        streams = self._streams
        packed = streams.allocate(compute, size_bytes)
        places = [packed[offset : offset + part.numel()] for offset, part in zip(offsets, parts, strict=True)]
        with streams.on(compute):
            foreach_copy(places, parts)
        # The parts are dropped next.
        for next_owner in self._computes:
            if next_owner != compute:
                streams.wait(next_owner, streams.fence(compute))
        return packed

    def offload(self, source: torch.Tensor, lease: Lease, compute: Any, stats: UnitStats) -> Fence | None:
        """Copies the bytes of ``source``, written on ``compute``, into the block. Returns the end of the copy."""
        streams = self._streams
        d2h = streams.d2h
        written = streams.fence(compute)
        streams.wait(d2h, written)
        for last_use in lease.fences:
            streams.wait(d2h, last_use)
        for block, part in lease.beside(source):
            streams.copy(d2h, block, part)
        return self._copied(Direction.OUT, lease, written, stats)

    def before_release(self, copied_out: Fence | None, stats: UnitStats) -> None:
        """After this the memory that ``copied_out`` read may be dropped: its next owner writes after the copy."""
        self._waits(copied_out, stats)
        self._all_wait(copied_out)

    def before_end(self, copied_out: Fence | None, stats: UnitStats) -> None:
        """As :meth:`before_release`, at any time, and perhaps in the middle of another call."""
        if self.recorder is not None and copied_out is not None:
            self.recorder.waits(copied_out, stats, self._streams.fence(self._last_compute))
        self._all_wait(copied_out)

    def reload(self, lease: Lease, compute: Any, stats: UnitStats) -> tuple[torch.Tensor, Fence | None]:
        """Copies the block into new device memory (uint8) of ``compute``'s pool. Returns it and the end of the copy.

        It comes after the copy out by way of the compute streams, which waited for that in :meth:`before_release`.
        """
        streams = self._streams
        h2d = streams.h2d
        destination = streams.allocate(compute, lease.size_bytes)
        unused = None
        for last_owner in self._computes:
            unused = streams.fence(last_owner)
            streams.wait(h2d, unused)
        for block, part in lease.beside(destination):
            streams.copy(h2d, part, block)
        return destination, self._copied(Direction.IN, lease, unused, stats)

    def before_use(self, copied_in: Fence | None, compute: Any, stats: UnitStats) -> None:
        """After this ``compute`` may read what was reloaded."""
        self._waits(copied_in, stats)
        self._streams.wait(compute, copied_in)

    def before_drop(self, copied_in: Fence | None, compute: Any) -> None:
        """After this reloaded memory that nobody used on ``compute`` may be dropped, into ``compute``'s pool."""
        self._streams.wait(compute, copied_in)

    def death(self) -> Fence | None:
        """Marks on the device when something dies; None if nobody wants to know."""
        return None if self.recorder is None else self.recorder.death(self._last_compute)

    def _all_wait(self, copied_out: Fence | None) -> None:
        for compute in tuple(self._computes):  # a finalizer may come in between
            self._streams.wait(compute, copied_out)

    def _copied(self, direction: Direction, lease: Lease, ready: Fence | None, stats: UnitStats) -> Fence | None:
        end = self._streams.fence(self._streams.d2h if direction is Direction.OUT else self._streams.h2d)
        if self.recorder is not None and ready is not None and end is not None:
            self.recorder.copied(direction, lease, ready, end, stats)
        return end

    def _waits(self, copied: Fence | None, stats: UnitStats) -> None:
        if self.recorder is not None and copied is not None:
            self.recorder.waits(copied, stats)


def transfer_on(device: torch.device) -> Transfer:
    """A transfer on ``device``. All share its two copy streams, as they share the link."""
    return Transfer(streams_on(device))


streams_on = cache(make_streams)


class ParcelState(Enum):
    """Who holds the bytes."""

    RESIDENT = "the device"
    COPYING_OUT = "the device; a copy to the host is under way or done"
    ON_HOST = "the host block alone"
    RELOADED = "the host block and new device memory"


class Death(NamedTuple):
    """Left behind by a parcel that is gone."""

    key: int
    leased_bytes: int
    when: Fence | None = None
    """None: nobody wants to know."""


class Parcel:
    """The state that the bytes are in, and the only ways from one state to the next.

    A way that does not start from the present state does nothing: what the schedule asks for is advice.

    Args:
        key: names the parcel to the schedule.
        content: aliases of the storages in it, private to this package: one, or several that are to be packed.
        stats: the counts of the unit that saved them.
        transfer: makes the copies.
        compute: the stream on which the content was made.
        deaths: gets a :class:`Death` when the parcel is gone, at any moment, on any thread.
        original: finds the first of the storages again if something else holds it.
    """

    __slots__ = (
        "__weakref__",
        "_alias",
        "_compute",
        "_content",
        "_copied_in",
        "_copied_out",
        "_deaths",
        "_lease",
        "_memory",
        "_original",
        "_ready_on",
        "_transfer",
        "_version",
        "accounted",
        "key",
        "needed",
        "offsets",
        "saved_bytes",
        "size_bytes",
        "state",
        "stats",
    )

    def __init__(
        self,
        key: int,
        content: Sequence[torch.Tensor],
        stats: UnitStats,
        transfer: Transfer,
        compute: Any,
        deaths: deque[Death],
        original: WeakStorage,
    ) -> None:
        self.key = key
        self.stats = stats
        self.state = ParcelState.RESIDENT
        self.needed = False
        """True once backward has used it."""
        self.accounted = False
        """True once it was counted what became of the bytes in backward."""
        sizes_bytes = [alias.untyped_storage().nbytes() for alias in content]
        self.saved_bytes = sum(sizes_bytes)
        """Bytes of the storages in it, which is what is counted; ``size_bytes`` has the gaps between them too."""
        self.offsets, self.size_bytes = _offsets(sizes_bytes)
        self._content: Sequence[torch.Tensor] = content if len(content) > 1 else ()
        # A single storage travels from where it is, and may be found there again.
        self._alias: torch.Tensor | None = content[0] if len(content) == 1 else None
        self._original = original
        self._version = version_counter(content[0])
        self._memory: torch.Tensor | None = self._alias
        self._lease: Lease | None = None
        self._copied_out: Fence | None = None
        self._copied_in: Fence | None = None
        self._ready_on: tuple[Any, ...] = ()  # streams that have waited for the copy in
        self._transfer = transfer
        self._compute = compute
        self._deaths = deaths

    def offload(self, lease: Lease) -> None:
        """Begins the copy to the host; the device memory stays until :meth:`release`."""
        self._lease = lease
        if self._content:
            sources = [storage_bytes(alias) for alias in self._content]
            self._memory = self._transfer.pack(sources, self.offsets, self.size_bytes, self._compute)
            for alias in self._content:
                drop_memory(alias)
            self._content = ()
        assert self._memory is not None
        self._copied_out = self._transfer.offload(storage_bytes(self._memory), lease, self._compute, self.stats)
        self.state = ParcelState.COPYING_OUT

    def release(self) -> None:
        """Drops this reference to the device memory, after the copy in the order of the device."""
        if self.state is not ParcelState.COPYING_OUT:
            return
        self._transfer.before_release(self._copied_out, self.stats)
        self._memory = None
        if self._alias is not None:
            drop_memory(self._alias)
        self.state = ParcelState.ON_HOST

    def reload(self) -> bool:
        """Makes the bytes come back to the device. False if they need no copy, because something else holds them."""
        if self.state is not ParcelState.ON_HOST or self._find_original():
            return False
        assert self._lease is not None
        self._memory, self._copied_in = self._transfer.reload(self._lease, self._compute, self.stats)
        self.state = ParcelState.RELOADED
        return True

    def memory(self) -> torch.Tensor:
        """The device memory of the whole parcel, ready for the caller's stream; reloaded now if need be."""
        if self._memory is None:
            self.reload()
        if self.state is ParcelState.RELOADED:
            compute = self._transfer.compute()
            if compute not in self._ready_on:
                self._transfer.before_use(self._copied_in, compute, self.stats)
                self._ready_on = (*self._ready_on, compute)
        assert self._memory is not None
        return self._memory

    def _find_original(self) -> bool:
        """Goes back to the single storage that was saved, if it is still on the device as it was."""
        if self._alias is None or version_counter(self._alias) != self._version:
            return False
        original = self._original.alive()
        if original is None or original.nbytes() != self.size_bytes:
            return False
        self._alias.data = torch.empty(0, dtype=torch.uint8, device=self._alias.device).set_(original)
        self._memory = self._alias
        self.state = ParcelState.COPYING_OUT
        return True

    def __del__(self) -> None:
        leased_bytes = 0
        if self._lease is not None:
            if self.state is ParcelState.COPYING_OUT:
                # What the copy would read after that is nobody's, but the pages may be unmapped under it, which faults
                # (expandable segments: their allocator waits for its own stream only).
                self._transfer.before_end(self._copied_out, self.stats)
            elif self.state is ParcelState.RELOADED and self._compute not in self._ready_on:
                self._transfer.before_drop(self._copied_in, self._compute)
            self._lease.give_back(self._copied_out, self._copied_in)
            leased_bytes = self.size_bytes
        self._deaths.append(Death(self.key, leased_bytes, self._transfer.death()))


def drop_memory(alias: torch.Tensor) -> None:
    """Lets go of the memory under ``alias``, a detached alias of this package's own, and keeps its version counter.

    The counter is shared with the tensor that was aliased, and goes on telling of changes in place.
    """
    alias.data = _nothing_on(alias.device)


_ALIGNMENT_BYTES = 512  # of the device allocator; more than any dtype needs


def _offsets(sizes_bytes: Sequence[int]) -> tuple[Sequence[int], int]:
    """Where each storage begins in the parcel, and the size of the whole."""
    if len(sizes_bytes) == 1:
        return (0,), sizes_bytes[0]
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        offsets.append(end)
        end += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, end


_nothing: dict[torch.device, torch.Tensor] = {}


def _nothing_on(device: torch.device) -> torch.Tensor:
    empty = _nothing.get(device)
    if empty is None:
        empty = _nothing[device] = torch.empty(0, dtype=torch.uint8, device=device)
    return empty
