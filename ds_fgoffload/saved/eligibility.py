"""Which saved tensors may leave the device: asked when autograd saves a tensor, before anything else is done with it.

What is moved and freed is a storage, so size is judged by the storage. Parameters and buffers stay, however they are
seen: they are not freed by being copied. A wrong "parameter" keeps a tensor on the device; a wrong "eligible" costs a
useless copy. Neither changes a gradient.

Ways in which a parameter shows up here, and what tells it:

* as itself, also gathered by ZeRO-3: its type;
* as a view that autograd tracks (``weight.t()`` in ``linear``): its base;
* as any other tensor on the same memory (``detach()``): the storage. ZeRO 1 and 2 keep all parameters in one flat
  storage. ZeRO-3 swaps a parameter's storage at each gather, so those are compared as they are at that moment;
* as a copy made by autocast: the graph leads back to the parameter through casts and views only;
* as a copy of a frozen parameter, made by autocast: nothing links it, so a shape of a frozen parameter in another dtype
  must do. (Whether autocast is on cannot be asked here: within the operation that saves, it is off.)
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_fgoffload.compat.private import BUFFERS, MODULES, PARAMETERS, base_of, is_zerotensor, storage_address
from ds_fgoffload.saved.tensors import storage_identity

EXCLUDED = "excluded"
"""Saved in a module that the user excluded."""
HOST_FULL = "host_full"
"""No room in the host pool."""
DEVICE_FULL = "device_full"
"""No device memory to pack small storages in."""
PARAMETER = "parameter"
"""A parameter, a view of one, or the copy of one in autocast's dtype."""
BUFFER = "buffer"
"""A buffer of the model, or a view of one."""
TOO_SMALL = "too_small"
"""The storage is smaller than ``min_tensor_bytes``."""
OTHER_DEVICE = "other_device"
"""Not on the device that is trained on, as scalars and indices on the CPU."""
NOT_STRIDED = "not_strided"
"""Sparse, quantized, lazily conjugated or negated, or without memory of its own: a copy of bytes would not do."""
SUBCLASS = "subclass"
"""A tensor subclass (DTensor, a float8 tensor, ...): what it is made of is its own affair."""
EMPTY = "empty"
"""No elements, or a storage without memory."""

_LINKS = frozenset(
    {
        "AliasBackward0",
        "AsStridedBackward0",
        "ExpandBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnbindBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
"""Nodes through which a parameter is still the same parameter, of which each has one input."""

_LONGEST_LINK = 8


class _Subtree(NamedTuple):
    """The parameters in one unit that need more than a look at :attr:`Eligibility._owners`."""

    swapped: tuple[weakref.ref[nn.Parameter], ...]
    frozen: dict[tuple[int, ...], set[torch.dtype]]


class Eligibility:
    """Decides for the tensors saved in ``root``, which is trained on ``device``."""

    def __init__(self, root: nn.Module, min_tensor_bytes: int, device: torch.device) -> None:
        # Graphs hold their hooks, which hold this: so nothing here holds a module or a parameter.
        self._root = weakref.ref(root)
        self._min_tensor_bytes = min_tensor_bytes
        self._device = device
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._trained: list[bool] = []
        self._owners: dict[int, weakref.ref[torch.Tensor]] = {}
        self._subtrees: weakref.WeakKeyDictionary[nn.Module, _Subtree] = weakref.WeakKeyDictionary()
        self.refresh()

    def refresh(self) -> None:
        """Reads anew where the parameters and buffers lie. Called where a micro-batch begins."""
        root = self._root()
        if root is None:
            return
        parameters, buffers = _tensors(root)
        owners = (owner for owner in (*buffers, *parameters) if _has_storage(owner))
        self._owners = {storage_identity(owner): weakref.ref(owner) for owner in owners}
        trained = [parameter.requires_grad for parameter in parameters]
        # Not "!=" on the lists: tensors compare by element.
        if trained != self._trained or not _are(self._parameters, parameters):
            self._subtrees.clear()
            self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._trained = trained

    def skip_reason(self, tensor: torch.Tensor, unit: nn.Module) -> str | None:  # noqa: PLR0911
        """Why ``tensor``, saved in ``unit``, must stay on the device; ``None`` if it may leave."""
        # Called for every saved tensor, so the cheap questions come first.
        if type(tensor) is not torch.Tensor:
            return PARAMETER if type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter) else SUBCLASS
        if tensor.device != self._device and not _is_same_device(tensor.device, self._device):
            return OTHER_DEVICE
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or _is_lazy(tensor):
            return NOT_STRIDED
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # the wrappers of torch.func have the type of a plain tensor, but no storage
            return NOT_STRIDED
        size_bytes = storage.nbytes()
        if size_bytes == 0 or tensor.numel() == 0:
            return EMPTY
        if size_bytes < self._min_tensor_bytes:
            return TOO_SMALL
        held = self._owners.get(storage_address(storage))
        owner = None if held is None else held()
        # The owner may have moved since refresh() and its former address serve another tensor now.
        if owner is not None and storage_identity(owner) == storage_address(storage):
            return PARAMETER if isinstance(owner, nn.Parameter) else BUFFER
        node = tensor.grad_fn
        if node is None:
            return PARAMETER if self._is_unlinked_parameter(tensor, storage_address(storage), unit) else None
        if type(node).__name__ in _LINKS and _leads_to_parameter(node):
            return PARAMETER
        return PARAMETER if isinstance(base_of(tensor), nn.Parameter) else None

    def _is_unlinked_parameter(self, tensor: torch.Tensor, address: int, unit: nn.Module) -> bool:
        if isinstance(base_of(tensor), nn.Parameter) or hasattr(tensor, "ds_id"):
            return True
        subtree = self._subtrees.get(unit)
        if subtree is None:
            subtree = self._subtrees[unit] = _subtree(unit)
        if subtree.frozen and not tensor.requires_grad:
            dtypes = subtree.frozen.get(tuple(tensor.shape))
            if dtypes is not None and dtypes != {tensor.dtype}:
                return True
        return any(
            (parameter := held()) is not None and storage_identity(parameter) == address for held in subtree.swapped
        )


def _are(held: list[weakref.ref[nn.Parameter]], parameters: list[nn.Parameter]) -> bool:
    return len(held) == len(parameters) and all(ref() is one for ref, one in zip(held, parameters, strict=True))


def _is_same_device(one: torch.device, other: torch.device) -> bool:
    """A device without index ("cuda") means any of its kind; there is just one CPU."""
    return one.type == other.type and None in {one.index, other.index}


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Its storage is not what it holds: conjugated or negated when read, or zeros without memory (forward-mode AD)."""
    return tensor.is_conj() or tensor.is_neg() or is_zerotensor(tensor)


def _leads_to_parameter(node: Any) -> bool:
    for _ in range(_LONGEST_LINK):
        following = node.next_functions
        node = following[0][0] if following else None
        if node is None:
            return False
        name = type(node).__name__
        if name not in _LINKS:
            # A leaf that is no parameter is an input of the model: an activation, cast or not.
            return name == "AccumulateGrad" and isinstance(node.variable, nn.Parameter)
    return False


def _tensors(root: nn.Module) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """All parameters and buffers below ``root``; several times faster than ``parameters()``, and called often."""
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, torch.Tensor] = {}
    seen: set[nn.Module] = set()
    modules: list[nn.Module] = [root]
    while modules:
        module = modules.pop()
        if module in seen:
            continue
        seen.add(module)
        # values(), because ZeRO-3's own dictionary gathers the parameters that are looked up by name
        parameters.update((id(p), p) for p in getattr(module, PARAMETERS).values() if p is not None)
        buffers.update((id(b), b) for b in getattr(module, BUFFERS).values() if b is not None)
        modules.extend(child for child in getattr(module, MODULES).values() if child is not None)
    return list(parameters.values()), list(buffers.values())


def _has_storage(tensor: torch.Tensor) -> bool:
    """False for what has no address that a plain tensor could share: subclasses, sparse tensors, lazy parameters."""
    return tensor.layout is torch.strided and type(tensor) in _PLAIN


_PLAIN = frozenset({torch.Tensor, nn.Parameter})


def _subtree(unit: nn.Module) -> _Subtree:
    parameters, _ = _tensors(unit)
    swapped = tuple(weakref.ref(p) for p in parameters if hasattr(p, "ds_id"))
    frozen: dict[tuple[int, ...], set[torch.dtype]] = {}
    for parameter in parameters:
        if not parameter.requires_grad and _has_storage(parameter):
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            for either in (shape, shape[::-1]):
                frozen.setdefault(either, set()).add(parameter.dtype)
    return _Subtree(swapped, frozen)
