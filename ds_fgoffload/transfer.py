"""The copies of one device, and the waits that make them right.

Every reader of memory comes after its writer, and every writer after the last reader, on the device and on the host
blocks, by waits between streams alone. Each wait below is needed: the tests take them out one by one and see a wrong
number or an access out of order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ds_fgoffload.layout import storage_bytes
from ds_fgoffload.pool import Lease
from ds_fgoffload.streams import Fence, Streams, make_streams


class Transfer:
    """Moves whole storages between the device and leased host blocks."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.device = streams.device
        self.synchronous = streams.synchronous
        self.compute = streams.compute

    def offload(self, source: torch.Tensor, lease: Lease, compute: Any) -> Fence | None:
        """Copies the storage of ``source``, written on ``compute``, into the block. Returns the end of the copy."""
        streams = self._streams
        d2h = streams.d2h
        streams.wait(d2h, streams.fence(compute))
        for last_use in lease.fences:
            streams.wait(d2h, last_use)
        streams.copy(d2h, lease.memory, storage_bytes(source))
        return streams.fence(d2h)

    def before_release(self, copied_out: Fence | None, compute: Any) -> None:
        """After this the device memory that ``copied_out`` read may be dropped: its next owner writes after the copy."""
        self._streams.wait(compute, copied_out)

    def reload(self, lease: Lease, copied_out: Fence | None, compute: Any) -> tuple[torch.Tensor, Fence | None]:
        """Copies the block into new device memory (uint8) of ``compute``'s pool. Returns it and the end of the copy."""
        streams = self._streams
        h2d = streams.h2d
        destination = streams.allocate(compute, lease.size_bytes)
        streams.wait(h2d, streams.fence(compute))
        streams.wait(h2d, copied_out)
        streams.copy(h2d, destination, lease.memory)
        return destination, streams.fence(h2d)

    def before_use(self, copied_in: Fence | None) -> Any:
        """After this the caller's stream, which is returned, may read what was reloaded."""
        compute = self._streams.compute()
        self._streams.wait(compute, copied_in)
        return compute

    def before_drop(self, copied_in: Fence | None, compute: Any) -> None:
        """After this reloaded memory may be dropped although nobody used it."""
        self._streams.wait(compute, copied_in)


@cache
def transfer_on(device: torch.device) -> Transfer:
    """The one transfer of ``device``: all attachments share its two copy streams, as they share the link."""
    return Transfer(make_streams(device))
