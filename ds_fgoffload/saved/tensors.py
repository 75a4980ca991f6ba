"""Facts about one tensor: whether it is plain, its storage, its version, its bits, and how it lies in the storage.

:class:`WeakStorage` refers to a storage without keeping it, and keeps the address of its record from being given to
another. :class:`Layout` is the geometry of a view, and makes the same view over a copy of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from ds_fgoffload.compat.private import (
    free_weak,
    is_functorch_wrapped,
    is_zerotensor,
    storage_address,
    storage_of_weak,
    version_counter,
    weak_is_gone,
    weak_storage,
)


class WeakStorage:
    """Of the storage under ``tensor``; torch's own makes two objects, and there is one for every saved storage."""

    __slots__ = ("identity",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.identity: int = weak_storage(tensor.untyped_storage())
        """The same for tensors over one storage, and of no other as long as this reference lives."""

    def alive(self) -> torch.UntypedStorage | None:
        """The storage; None if it is gone."""
        storage: torch.UntypedStorage | None = storage_of_weak(self.identity)
        return storage

    def is_gone(self) -> bool:
        return bool(weak_is_gone(self.identity))

    # as a default, because at the interpreter's end the module torch may be empty
    def __del__(self, _free: Callable[[int], None] = free_weak) -> None:
        _free(self.identity)


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


def version_of(tensor: torch.Tensor) -> int:
    """The version, which tensors made in inference mode do not have."""
    return -1 if tensor.is_inference() else version_counter(tensor)


def storage_identity(tensor: torch.Tensor) -> int:
    """The same for tensors over one storage, as long as it lives."""
    identity: int = storage_address(tensor.untyped_storage())
    return identity


def is_parameter(tensor: torch.Tensor) -> bool:
    """``isinstance`` alone is slow for what is none."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor whose dtype, size, stride and bytes are all there is to it."""
    return (
        type(tensor) in {torch.Tensor, nn.Parameter}
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and not (tensor.is_conj() or tensor.is_neg() or is_zerotensor(tensor))
        and not is_functorch_wrapped(tensor)
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if dtype, size, stride and every bit are the same. Waits for the device."""
    if signature(one) != signature(other):
        return False
    return torch.equal(_bits(one), _bits(other))


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Another one, as good as always, if a bit of ``tensor`` is another. Does not wait for the device."""
    words = _bits(tensor)
    if words.storage_offset() % _WORD_BYTES or words.data_ptr() % _WORD_BYTES:
        words = words.clone()
    odd = words.numel() % _WORD_BYTES
    words, rest = words[: words.numel() - odd].view(torch.int64), words[words.numel() - odd :]
    table, few = words[: words.numel() // _ROW * _ROW].view(-1, _ROW), words[words.numel() // _ROW * _ROW :]
    # both ways, because what has changed places has the same sum
    return torch.cat((table.sum(0), table.sum(1), few, rest.to(torch.int64)))


_WORD_BYTES, _ROW = 8, 1024


def signature(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """What must be the same of a tensor that is made again."""
    return tensor.dtype, tensor.size(), tensor.stride()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:  # expanded: one of many that are the same
            tensor = tensor.narrow(dimension, 0, min(1, tensor.size(dimension)))
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
