"""The copies of one device, and the waits that make them right.

Every reader of memory comes after its writer, and every writer after the last reader, on the device and on the host
blocks, by waits between streams alone. Each wait below is needed: the tests take them out one by one and see a wrong
number or an access out of order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ds_fgoffload.pool import Lease
from ds_fgoffload.recorder import Recorder
from ds_fgoffload.round_times import Direction
from ds_fgoffload.stats import UnitStats
from ds_fgoffload.streams import Fence, Streams, make_streams


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
            torch._foreach_copy_(places, parts)
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
