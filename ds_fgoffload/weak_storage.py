"""A weak reference to a storage, which keeps the address of its record from being given to another."""

from __future__ import annotations

from collections.abc import Callable

import torch


class WeakStorage:
    """Of the storage under ``tensor``; torch's own makes two objects, and there is one for every saved storage."""

    __slots__ = ("identity",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.identity: int = tensor.untyped_storage()._weak_ref()  # type: ignore[assignment]  # noqa: SLF001
        """The same for tensors over one storage, and of no other as long as this reference lives."""

    def alive(self) -> torch.UntypedStorage | None:
        """The storage; None if it is gone."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.identity)
        return storage

    def is_gone(self) -> bool:
        return bool(torch.UntypedStorage._expired(self.identity))  # noqa: SLF001

    # as a default, because at the interpreter's end the module torch may be empty
    def __del__(self, _free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:  # noqa: SLF001
        _free(self.identity)
