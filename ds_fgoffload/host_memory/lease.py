"""A block of host memory on loan, and the account of the one it is lent to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from ds_fgoffload.device.streams import Fence
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.host_memory.free_ranges import Range


@dataclass
class Account:
    """What one engine has on lease from the pool; sizes in bytes."""

    quota_bytes: int | None = None
    """Most it may have on lease; ``None``: what the pool has."""
    requested_bytes: int = 0
    leased_bytes: int = 0
    peak_leased_bytes: int = 0
    leases: int = 0
    refused_leases: int = 0

    def lend(self, size_bytes: int, rounded_bytes: int) -> None:
        self.requested_bytes += size_bytes
        self.leased_bytes += rounded_bytes
        self.peak_leased_bytes = max(self.peak_leased_bytes, self.leased_bytes)
        self.leases += 1

    def settle(self, size_bytes: int, rounded_bytes: int) -> None:
        self.requested_bytes -= size_bytes
        self.leased_bytes -= rounded_bytes


class Lease:
    """The loan of ``size_bytes`` of host memory. Not given back by itself: only its user knows the last uses."""

    __slots__ = ("_borders", "_inbox", "_memory", "account", "fences", "size_bytes", "taken")

    def __init__(
        self,
        inbox: deque[Note],
        memory: torch.Tensor,
        taken: Range[Fence] | None,
        account: Account,
        borders: tuple[int, ...] = (),
    ) -> None:
        self.size_bytes = memory.numel()
        self.fences: tuple[Fence, ...] = () if taken is None else taken.marks
        """The writer of this block waits for them, on the device, before its first write."""
        self._inbox = inbox
        self._memory: torch.Tensor | None = memory
        self._borders = borders
        self.taken = taken
        """What the pool knows the block by, until it has read that the block was given back."""
        self.account = account

    @property
    def memory(self) -> torch.Tensor:
        """The block: uint8, one-dimensional. Raises ``OffloadStateError`` after :meth:`give_back`."""
        if self._memory is None:
            raise OffloadStateError(f"a host block of {self.size_bytes} bytes was given back: use it before that")
        return self._memory

    def beside(self, other: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The block and ``other`` (as long as it is), in parts that the device can copy: nearly always one.

        Memory that was page-locked in two calls is two for the device, also where it lies side by side.
        """
        if not self._borders:
            return [(self.memory, other)]
        return list(zip(self.memory.tensor_split(self._borders), other.tensor_split(self._borders), strict=True))

    def give_back(self, *fences: Fence | None) -> None:
        """Ends the loan; ``fences`` are the last uses on the device. Later calls do nothing.

        May be called by the garbage collector at any moment, also inside one of the pool's locked methods on the same
        thread. So it only leaves a note, which the pool reads at its next lease, stats, trim or close.
        """
        self._memory = None
        self._inbox.append((self, fences))


Note = tuple[Lease, tuple[Fence | None, ...]] | str  # the text is the name of a user that has gone
