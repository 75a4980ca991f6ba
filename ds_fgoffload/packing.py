"""What becomes of a tensor that autograd saves: in a unit, in a recomputed one, as its argument, and elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from ds_fgoffload.offloader import Offloader
from ds_fgoffload.open_calls import OpenCalls
from ds_fgoffload.recompute import Recomputer
from ds_fgoffload.remade import Remade
from ds_fgoffload.saved import KeptTensor


class Packing:
    """Autograd's two hooks, the same around every call: which call it is, the calls that are open tell.

    (Autograd keeps with each saved tensor the hooks that it was saved under. A pair for each call would be as many
    objects more that Python's collector goes through.)

    Args:
        recomputer: what its units have given is promised; None: there are none.
    """

    def __init__(self, offloader: Offloader, recomputer: Recomputer | None, open_calls: OpenCalls) -> None:
        self._offloader = offloader
        self._recomputer = recomputer
        self._open_calls = open_calls

    def pack(self, tensor: torch.Tensor) -> object:
        """Autograd saves ``tensor``; what is returned is what it holds."""
        call = self._open_calls.saving()
        # A backward that is run inside a forward saves tensors of its own, for its own use.
        if call is None or in_backward():
            return KeptTensor(tensor)
        if call.recomputed is not None:
            return call.recomputed.call.pack(tensor)
        promise = None if self._recomputer is None else self._recomputer.promise(tensor)
        if promise is not None:
            return promise
        return KeptTensor(tensor) if call.scope is None else self._offloader.pack(call.scope, tensor)

    def pack_argument(self, tensor: torch.Tensor) -> object:
        """An argument of a recomputed unit that is about to be opened, to be held until backward."""
        scope = self._open_calls.scope()
        return KeptTensor(tensor) if scope is None else self._offloader.pack(scope, tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Autograd needs a tensor back, whichever of the above held it."""
        return packed.tensor() if type(packed) is Remade else self._offloader.unpack(packed)


def keep(tensor: torch.Tensor) -> KeptTensor:
    """Saved where nothing may move."""
    return KeptTensor(tensor)


def in_backward() -> bool:
    """Whether a backward runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def may_save() -> bool:
    """Whether what runs now in this thread may save tensors for a later backward, and autograd tells of them."""
    return torch.is_grad_enabled() and hooks_allowed() and not in_backward()


def hooks_allowed() -> bool:
    """Whether autograd takes saved-tensor hooks now."""
    # torch.func transforms forbid saved-tensor hooks while they run
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]
