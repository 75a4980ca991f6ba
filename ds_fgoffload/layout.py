"""The geometry of a saved tensor: how a view lies in its storage, and the same view over another copy of those bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """dtype, size, stride and offset (in elements) of a tensor within its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """This view over ``memory``, which holds the bytes of the storage.

        ``memory`` is a tensor over that very storage, or a one-dimensional uint8 tensor of its bytes. What is returned
        shares its version counter, so that a change made through one view is seen before the next is used.
        """
        if memory.dtype is self.dtype:
            return memory.as_strided(self.size, self.stride, self.offset)
        itemsize = self.dtype.itemsize
        if memory.dtype is not torch.uint8:
            elements = memory.untyped_storage().nbytes() // memory.itemsize
            memory = memory.as_strided((elements,), (1,), 0).view(torch.uint8)
        whole = memory.numel() // itemsize * itemsize
        memory = (memory if whole == memory.numel() else memory[:whole]).view(self.dtype)
        return memory.as_strided(self.size, self.stride, memory.storage_offset() + self.offset)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under ``tensor`` as a one-dimensional uint8 tensor.

    The layout of ``tensor`` does not matter: expanded, transposed or sliced, its storage is what is moved.
    """
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
