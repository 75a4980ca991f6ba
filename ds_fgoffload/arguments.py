"""The arguments of a call that will be made again: flat, and held by something that gives them back in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Argument:
    """A tensor that was given to a call: what holds it, and whether it needs a gradient."""

    __slots__ = ("_holder", "_requires_grad", "_unpack")

    def __init__(self, tensor: torch.Tensor, holder: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._holder = holder
        self._unpack = unpack
        self._requires_grad = tensor.requires_grad

    def tensor(self) -> torch.Tensor:
        return cut_off(self._unpack(self._holder), requires_grad=self._requires_grad)


def cut_off(tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """``tensor`` without the graph that made it. A parameter is itself: it is told from others where it is saved."""
    return tensor if isinstance(tensor, Parameter) else tensor.detach().requires_grad_(requires_grad)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec | None]:
    """The arguments of a call as a list, and their structure; None: a tuple of them, as nearly always."""
    if not kwargs and all(type(arg) in _LEAVES for arg in args):
        return list(args), None
    return tree_flatten((args, kwargs))


def unflatten(leaves: list[Any], structure: TreeSpec | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of what :func:`flatten` made of them."""
    if structure is None:
        return tuple(leaves), {}
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


_LEAVES = frozenset({torch.Tensor, Parameter, type(None), bool, int, float})
