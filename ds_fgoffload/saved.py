"""What autograd holds instead of a tensor: a view, and under it the storage that travels to the host and back.

The views own the storage: when autograd drops the last one, its device memory and its host block go back, whatever it
was doing. Nothing else ends it, neither a first use nor a step boundary.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.layout import Layout
from ds_fgoffload.pool import Lease
from ds_fgoffload.stats import UnitStats
from ds_fgoffload.streams import Fence
from ds_fgoffload.transfer import Transfer


class State(Enum):
    """Who holds the bytes."""

    RESIDENT = "the device"
    COPYING_OUT = "the device; a copy to the host is under way or done"
    ON_HOST = "the host block alone"
    RELOADED = "the host block and new device memory"


class Death(NamedTuple):
    """Left behind by a storage whose last view is gone."""

    key: int
    identity: int
    leased_bytes: int


class SavedStorage:
    """One device storage saved for backward, the state it is in, and the only ways from one state to the next.

    A way that does not start from the present state does nothing: what the schedule asks for is advice.

    Args:
        key: names it to the schedule.
        tensor: a tensor over the storage; it is neither kept nor touched, only aliased.
        stats: the counts of the unit that saved it first.
        transfer: makes the copies.
        deaths: gets a :class:`Death` when the last view is gone, at any moment, on any thread.
    """

    __slots__ = (
        "__weakref__",
        "_alias",
        "_awaited",
        "_compute",
        "_copied_in",
        "_copied_out",
        "_deaths",
        "_lease",
        "_memory",
        "_original",
        "_transfer",
        "_version",
        "identity",
        "key",
        "size_bytes",
        "state",
        "stats",
    )

    def __init__(
        self, key: int, tensor: torch.Tensor, stats: UnitStats, transfer: Transfer, deaths: deque[Death]
    ) -> None:
        storage = tensor.untyped_storage()
        self.key = key
        self.size_bytes = storage.nbytes()
        self.stats = stats
        self.state = State.RESIDENT
        # The weak reference keeps the address of the storage's record from being given to another storage.
        self._original = StorageWeakRef(storage)
        self.identity: int = self._original.cdata
        # A detached alias shares the version counter. It goes on telling of in-place changes after its memory is gone.
        self._alias = tensor.detach()
        self._version = tensor._version
        self._memory: torch.Tensor | None = self._alias
        self._lease: Lease | None = None
        self._copied_out: Fence | None = None
        self._copied_in: Fence | None = None
        self._awaited = False
        self._transfer = transfer
        self._compute: Any = transfer.compute()
        self._deaths = deaths

    def covers(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor``, a tensor over the same storage, has the values that were saved."""
        return bool(self._alias._version == self._version == tensor._version)

    def offload(self, lease: Lease) -> None:
        """Begins the copy to the host; the device memory stays until :meth:`release`."""
        self._copied_out = self._transfer.offload(self._alias, lease, self._compute)
        self._lease = lease
        self.state = State.COPYING_OUT

    def release(self) -> None:
        """Drops this reference to the device memory, after the copy in the order of the device."""
        if self.state is not State.COPYING_OUT:
            return
        self._transfer.before_release(self._copied_out, self._compute)
        self._memory = None
        self._alias.data = _nothing_on(self._alias.device)
        self.state = State.ON_HOST

    def reload(self) -> bool:
        """Makes the bytes come back to the device. False if they need no copy, because something else holds them."""
        if self._memory is not None:
            return False
        original = torch.UntypedStorage._new_with_weak_ptr(self._original.cdata)
        if original is not None and original.nbytes() == self.size_bytes and self._alias._version == self._version:
            self._alias.data = torch.empty(0, dtype=torch.uint8, device=self._alias.device).set_(original)
            self._memory = self._alias
            self.state = State.COPYING_OUT
            return False
        assert self._lease is not None
        destination, self._copied_in = self._transfer.reload(self._lease, self._copied_out, self._compute)
        # .data has a version counter of its own: the copy itself must not count as a change of the saved values.
        self._memory = destination.data
        self.state = State.RELOADED
        return True

    def view(self, layout: Layout) -> torch.Tensor:
        """The saved tensor with that layout, ready for the caller's stream.

        Raises:
            RuntimeError: the saved values were changed in place, as autograd itself would have raised.
        """
        if self._memory is None:
            self.reload()
        memory = self._memory
        assert memory is not None
        if self._alias._version != self._version or (memory is not self._alias and memory._version != 0):
            raise RuntimeError(_changed_in_place(layout, self._version, max(self._alias._version, memory._version)))
        if self.state is State.RELOADED:
            self._awaited |= self._transfer.before_use(self._copied_in) == self._compute
        return layout.over(memory)

    def __del__(self) -> None:
        if self._lease is not None:
            # A copy out that still reads the freed memory spoils only a block that nobody will read; a copy in would
            # spoil the memory's next owner.
            if self.state is State.RELOADED and not self._awaited:
                self._transfer.before_drop(self._copied_in, self._compute)
            self._lease.give_back(self._copied_out, self._copied_in)
            self._deaths.append(Death(self.key, self.identity, self.size_bytes))
        else:
            self._deaths.append(Death(self.key, self.identity, 0))


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
        self._tensor = tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach()
        self._version = tensor._version
        self._elements = tensor.numel()

    def tensor(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since it was saved.
            OffloadStateError: it is a parameter that was partitioned since (ZeRO-3) and not gathered again.
        """
        tensor = self._tensor
        if tensor._version != self._version:
            raise RuntimeError(_changed_in_place(Layout.of(tensor), self._version, tensor._version))
        if tensor.numel() != self._elements:
            msg = (
                f"a parameter of {self._elements} elements saved for backward has {tensor.numel()} now: it was "
                "partitioned after forward and not gathered for backward; keep it whole until backward has run "
                "(stage3_param_persistence_threshold), or leave its module out of fine_grained_offload.modules"
            )
            raise OffloadStateError(msg)
        return tensor


_nothing: dict[torch.device, torch.Tensor] = {}


def _nothing_on(device: torch.device) -> torch.Tensor:
    empty = _nothing.get(device)
    if empty is None:
        empty = _nothing[device] = torch.empty(0, dtype=torch.uint8, device=device)
    return empty


def _changed_in_place(layout: Layout, expected: int, found: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{layout.dtype} {list(layout.size)}] is at version {found}; expected version {expected} instead"
    )
