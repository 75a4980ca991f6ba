"""What autograd holds instead of a tensor: a view, and under it the storage that was saved, wherever its bytes are."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ds_fgoffload.compat.private import base_of, increment_version, preserve_version, version_counter
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.saved.tensors import Layout, WeakStorage, is_parameter
from ds_fgoffload.saved.transfer import Parcel


class SavedStorage:
    """One device storage saved for backward, shared by all views that autograd holds of it.

    Args:
        tensor: a tensor over the storage; it is neither kept nor touched, only aliased.
        compute: the stream on which it was made.
    """

    __slots__ = (
        "__weakref__",
        "_offset",
        "_owner",
        "_restored",
        "_restored_from",
        "_version",
        "alias",
        "checksum",
        "compute",
        "original",
        "parcel",
        "size_bytes",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, compute: Any) -> None:
        self.size_bytes = tensor.untyped_storage().nbytes()
        self.original = WeakStorage(tensor)
        # A detached alias shares the version counter, and goes on telling of changes in place when its memory is gone.
        self.alias = tensor.detach()
        self._version = version_counter(tensor)
        self._owner = weakref.ref(_owner_of_version_counter(tensor))
        self.compute = compute
        self.parcel: Parcel | None = None
        self.checksum: torch.Tensor | None = None
        """Of its bytes when it was saved, if somebody asked for it."""
        self._offset = 0
        self._restored: torch.Tensor | None = None
        self._restored_from: torch.Tensor | None = None

    def covers(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor``, a tensor over the same storage, has the values that were saved."""
        if not version_counter(self.alias) == self._version == version_counter(tensor):
            return False
        # Two tensors over one storage may count their changes apart, as the outputs of unsafe_chunk in a GRU do. A view
        # counts with its base; with a detached tensor (ZeRO-3 detaches what every module is given) only a try tells.
        return self._owner() is _owner_of_version_counter(tensor) or _count_together(self.alias, tensor)

    def send_with(self, parcel: Parcel, offset: int) -> None:
        """From now on the parcel knows where the bytes are; there they begin at ``offset``."""
        self.parcel = parcel
        self._offset = offset

    def view(self, layout: Layout) -> torch.Tensor:
        """The saved tensor with that layout, ready for the caller's stream.

        Raises:
            RuntimeError: the saved values were changed in place, as autograd itself would have raised.
        """
        memory = self.alias if self.parcel is None else self.parcel.memory()
        if memory is not self.alias:
            self._restore_from(memory)
        changes = (
            version_counter(self.alias)
            - self._version
            + (0 if self._restored is None else version_counter(self._restored))
        )
        if changes:
            raise RuntimeError(changed_in_place(layout, self._version, self._version + changes))
        if memory is self.alias:
            return layout.over(memory)
        assert self._restored is not None
        return layout.within(self._restored)

    def _restore_from(self, memory: torch.Tensor) -> None:
        """Finds the bytes of this storage in the parcel's memory, with a version counter of their own (``.data``)."""
        changed = self._restored is not None and version_counter(self._restored) != 0
        if self._restored_from is not memory and not changed:
            self._restored_from = memory
            self._restored = memory[self._offset : self._offset + self.size_bytes].data


class SavedView:
    """What autograd holds for a tensor whose storage may travel."""

    __slots__ = ("layout", "storage")

    def __init__(self, storage: SavedStorage, layout: Layout) -> None:
        self.storage = storage
        self.layout = layout


class KeptTensor:
    """What autograd holds for a tensor that stays: the tensor, and the version it had.

    Under a saved-tensor hook autograd no longer compares versions, for any tensor; so it is done here.
    A parameter is returned as the very same object. Anything else is held detached: an output that held its own
    ``grad_fn`` would be a reference cycle that no collector sees.
    """

    __slots__ = ("_elements", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor if is_parameter(tensor) else tensor.detach()
        self._version = version_counter(tensor)
        self._elements = tensor.numel()

    @property
    def is_changed(self) -> bool:
        """True if it was changed in place since it was saved."""
        return version_counter(self._tensor) != self._version

    def tensor(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since it was saved.
            OffloadStateError: it is a parameter that was partitioned since (ZeRO-3) and not gathered again.
        """
        tensor = self._tensor
        if version_counter(tensor) != self._version:
            raise RuntimeError(changed_in_place(Layout.of(tensor), self._version, version_counter(tensor)))
        if tensor.numel() != self._elements:
            msg = (
                f"a parameter of {self._elements} elements saved for backward has {tensor.numel()} now: it was "
                "partitioned after forward and not gathered for backward; keep it whole until backward has run "
                "(stage3_param_persistence_threshold), or leave its module out of fine_grained_offload.modules"
            )
            raise OffloadStateError(msg)
        return tensor


def _owner_of_version_counter(tensor: torch.Tensor) -> torch.Tensor:
    base = base_of(tensor)
    return tensor if base is None else base


def _count_together(alias: torch.Tensor, tensor: torch.Tensor) -> bool:
    """True if both tell of the same changes: ``alias``, which is ours, is counted up for a moment."""
    with preserve_version(alias):
        increment_version((alias,))
        return bool(version_counter(tensor) == version_counter(alias))


def changed_in_place(layout: Layout, expected: int, found: int) -> str:
    """What autograd says of a saved tensor that was changed."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{layout.dtype} {list(layout.size)}] is at version {found}; expected version {expected} instead"
    )
