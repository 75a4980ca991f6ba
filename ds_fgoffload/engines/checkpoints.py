"""Finds DeepSpeed's own activation checkpointing inside units.

It keeps its inputs as an attribute of its context or in a closure, where no saved-tensor hook sees them. So they stay
on the device, whatever was selected, and that has to be said.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from ds_fgoffload.compat.compiled import ModuleHook
from ds_fgoffload.compat.private import compiled_call
from ds_fgoffload.runtime.hooks import ModuleHooks
from ds_fgoffload.stats import UnitStats, shown
from ds_fgoffload.text.names import abbreviated

ALTERNATIVE = (
    "call torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False) instead (PipelineModule: "
    "activation_checkpoint_func=functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))"
)

_FUNCTIONS: frozenset[CodeType] = frozenset(
    {checkpointing.CheckpointFunction.forward.__code__, checkpointing.non_reentrant_checkpoint.__code__}
)


class UnseenCheckpoints:
    """Looks for them in the first forward with gradients, then takes its hooks off.

    DeepSpeed's functions are not replaced, because models hold references to them. A module that is called by one of
    them finds it among its callers.
    """

    def __init__(self, root: nn.Module, hooks: ModuleHooks, units: Mapping[str, UnitStats]) -> None:
        self._hooks = hooks
        self._units = units
        self._by_unit: Counter[str] = Counter()
        self._last: FrameType | None = None
        self._handles = [root.register_forward_pre_hook(_EagerHook(self._forward_began))]

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._last = None

    def _forward_began(self, root: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.remove()
        # first, so that a unit which is called inside a checkpoint is not open yet
        inside = [m.register_forward_pre_hook(ModuleHook(self._called), prepend=True) for m in _eager_modules(root)]
        self._handles = [*inside, root.register_forward_hook(ModuleHook(self._forward_ended), always_call=True)]

    def _called(self, *_: Any) -> None:
        found = _calling_checkpoint()
        if found is not None and found is not self._last:
            unit = self._hooks.open_unit()
            if unit is not None and not checkpointing.CPU_CHECKPOINT:  # else DeepSpeed itself moves the inputs
                self._by_unit[unit] += 1
        self._last = found

    def _forward_ended(self, *_: Any) -> None:
        self.remove()
        if self._by_unit:
            for unit, count in self._by_unit.items():
                self._units[unit].unseen_checkpoints += count
            self._hooks.warn(
                f"fine_grained_offload: deepspeed.checkpointing runs in {abbreviated(map(shown, self._by_unit))} and "
                f"keeps its inputs where no saved-tensor hook sees them, so they stay on the device; {ALTERNATIVE}"
            )


class _EagerHook(ModuleHook):
    """Does nothing where Dynamo looks on: compiled code would be compiled again when hooks in it come and go."""

    def __call__(self, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(*arguments)


def _eager_modules(root: nn.Module) -> Iterator[nn.Module]:
    """The modules below ``root`` that are not compiled, nor inside one that is."""
    for child in root.children():
        if compiled_call(child) is None and type(child).__name__ != "OptimizedModule":
            yield child
            yield from _eager_modules(child)


def _calling_checkpoint() -> FrameType | None:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in _FUNCTIONS:
        frame = frame.f_back
    return frame
