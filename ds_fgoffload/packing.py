"""What becomes of a tensor that autograd saves: in a unit, as the argument of a recomputed one, and elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from ds_fgoffload.offloader import Offloader
from ds_fgoffload.recompute import Recomputer
from ds_fgoffload.remade import Remade
from ds_fgoffload.saved import KeptTensor
from ds_fgoffload.scope import Scope


def pack(offloader: Offloader, scope: Scope, tensor: torch.Tensor) -> object:
    """Saved in a unit."""
    # A backward that is run inside the unit's forward saves tensors of its own, for its own use.
    return KeptTensor(tensor) if in_backward() else offloader.pack(scope, tensor)


def pack_or_promise(recomputer: Recomputer, offloader: Offloader, scope: Scope | None, tensor: torch.Tensor) -> object:
    """Saved in a unit, or (``scope`` None) in none; what a recomputed unit gave is promised."""
    if in_backward():
        return KeptTensor(tensor)
    promise = recomputer.promise(tensor)
    return pack_argument(offloader, scope, tensor) if promise is None else promise


def pack_argument(offloader: Offloader, scope: Scope | None, tensor: torch.Tensor) -> object:
    """An argument of a recomputed unit, to be held until backward."""
    return KeptTensor(tensor) if scope is None else offloader.pack(scope, tensor)


def unpack(offloader: Offloader, packed: Any) -> torch.Tensor:
    """Autograd needs a tensor back, whichever of the above held it."""
    return packed.tensor() if type(packed) is Remade else offloader.unpack(packed)


def keep(tensor: torch.Tensor) -> KeptTensor:
    """Saved where nothing may move."""
    return KeptTensor(tensor)


def in_backward() -> bool:
    """Whether a backward runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def hooks_allowed() -> bool:
    """Whether autograd takes saved-tensor hooks now."""
    # torch.func transforms forbid saved-tensor hooks while they run
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]
