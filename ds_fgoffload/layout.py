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
        return cls(tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """This view over the storage of ``memory``.

        It shares ``memory``'s version counter, so that a change made through one view is seen before the next is used.
        """
        if memory.dtype != self.dtype:
            size_bytes = memory.untyped_storage().nbytes()
            elements = memory.as_strided((size_bytes // memory.itemsize,), (1,), 0)
            memory = elements.view(torch.uint8)[: size_bytes // self.dtype.itemsize * self.dtype.itemsize]
            memory = memory.view(self.dtype)
        return memory.as_strided(self.size, self.stride, self.offset)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under ``tensor`` as a one-dimensional uint8 tensor.

    The layout of ``tensor`` does not matter: expanded, transposed or sliced, its storage is what is moved.
    """
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
