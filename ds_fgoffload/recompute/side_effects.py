"""What tells that a module must not run twice: its forward leaves traces, or does not give the same bits again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import Enum
from types import NoneType
from typing import Any

import torch
from torch import nn

from ds_fgoffload.compat.private import BUFFERS, PARAMETERS
from ds_fgoffload.recompute.read_state import OF_DEEPSPEED
from ds_fgoffload.saved.tensors import is_plain, same_bits

_CONSTANTS = (NoneType, bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout,
              torch.memory_format, torch.Size, slice, type)  # fmt: skip
_NO_TENSORS = frozenset({NoneType, bool, int, float, str, tuple, list, dict, set, OrderedDict})


class GivenGradients:
    """The parameters of ``modules`` to which a backward gives gradients, from now on to :meth:`found`.

    One that runs inside a forward (DeepSpeed's TiledMLP, tiled losses) would give them twice if that ran again.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._given: list[torch.Tensor] = []
        parameters = {id(one): one for module in modules for one in getattr(module, PARAMETERS).values()}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._given.append)
            for parameter in parameters.values()
            if parameter is not None and parameter.requires_grad and parameter.is_leaf
        ]

    def found(self) -> str | None:
        """What speaks against running the forward again, or None."""
        self.end()
        return "its forward runs a backward, which gives gradients to its parameters" if self._given else None

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class SideEffects:
    """What ``modules`` hold before a forward, to see what the forward changes. Buffers are copied."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in _named_buffers(modules)]
        self._attributes = [dict(_attributes(module)) for module in modules]

    def found(self) -> str | None:
        """What the forward has changed, or None."""
        # BatchNorm's running statistics change without their version being counted up
        for name, buffer, before in self._buffers:
            if not same_bits(buffer, before):
                return f"its forward changes the buffer {name}"
        for module, held in zip(self._modules, self._attributes, strict=True):
            holds = dict(_attributes(module))
            for name in {**held, **holds}:
                if name not in held or name not in holds or _differ(held[name], holds[name]):
                    return f"its forward sets the attribute {name} of {type(module).__name__}"
        return None


def state_tensors(modules: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """The parameters and buffers, and tensors that are plain attributes."""
    for module in modules:
        # values(), because ZeRO-3's own dictionary gathers the parameters that are looked up by name
        holders: tuple[dict[str, Any], ...] = (getattr(module, PARAMETERS), getattr(module, BUFFERS), module.__dict__)
        for held in holders:
            for value in held.values():
                # not isinstance alone: it is slow for what is no tensor, and this is done at every call
                if type(value) not in _NO_TENSORS and isinstance(value, torch.Tensor):
                    yield value


def objection_to(leaves: Sequence[object], what: str) -> str | None:
    """Why one of ``leaves``, arguments or outputs, cannot be kept or made again; None if they can."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if not is_plain(leaf):
                return f"{what} a {type(leaf).__name__} that is not a plain strided tensor"
        elif not isinstance(leaf, _CONSTANTS):
            return f"{what} a {type(leaf).__name__}, of which it cannot be told whether it changes"
    return None


def _named_buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for module in modules:
        for name, buffer in getattr(module, BUFFERS).items():
            if buffer is not None and is_plain(buffer):
                yield name, buffer


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not name.startswith(OF_DEEPSPEED):
            yield name, value


def _differ(one: object, other: object) -> bool:
    if isinstance(one, bool | int | float | str | torch.Size) and type(one) is type(other):
        return one != other
    return one is not other
