"""The geometry of a saved tensor: how a view lies in its storage, and the same view over a copy of those bytes."""

from __future__ import annotations

from functools import lru_cache
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
        return _layout(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def over(self, tensor: torch.Tensor) -> torch.Tensor:
        """This view over the storage of ``tensor``, which may be any other view of it.

        It shares ``tensor``'s version counter, so that a change made through one view is seen before the next is used.
        """
        if tensor.dtype is self.dtype:
            return tensor.as_strided(self.size, self.stride, self.offset)
        elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        return self.within(tensor.as_strided((elements,), (1,), 0).view(torch.uint8))

    def within(self, content: torch.Tensor) -> torch.Tensor:
        """The same over ``content``: the bytes of the storage, one-dimensional and uint8, somewhere in another one."""
        size_bytes = content.numel() // self.dtype.itemsize * self.dtype.itemsize
        elements = (content if size_bytes == content.numel() else content[:size_bytes]).view(self.dtype)
        return elements.as_strided(self.size, self.stride, elements.storage_offset() + self.offset)


@lru_cache(maxsize=4096)
def _layout(dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> Layout:
    """The same object for the same layout: what lives until backward costs Python's collector time."""
    return Layout(dtype, size, stride, offset)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under ``tensor`` as a one-dimensional uint8 tensor.

    The layout of ``tensor`` does not matter: expanded, transposed or sliced, its storage is what is moved.
    """
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
