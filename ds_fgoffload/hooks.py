"""Where a saved tensor enters and leaves: module hooks open a scope around a unit's call, autograd's hooks do the rest.

The only importer of ``torch.autograd.graph``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ds_fgoffload.offloader import Offloader
from ds_fgoffload.saved import KeptTensor
from ds_fgoffload.scope import Scope


class _OpenCall(NamedTuple):
    module: nn.Module
    scope: Scope | None
    hooks: saved_tensors_hooks | None


class _OpenCalls(threading.local):
    """Calls of hooked modules that have not returned, outermost first; each thread runs its own."""

    def __init__(self) -> None:
        self.stack: list[_OpenCall] = []


class ModuleHooks:
    """The hooks of one attachment on its modules.

    Args:
        root: its forward begins a micro-batch.
        hooked: units, and excluded modules inside them, by name.
        offloader: gets every event.
    """

    def __init__(self, root: nn.Module, hooked: Mapping[str, nn.Module], offloader: Offloader) -> None:
        self._offloader = offloader
        self._open_calls = _OpenCalls()
        self._handles: list[RemovableHandle] = [
            root.register_forward_pre_hook(_ModuleHook(self._begin_micro_batch), prepend=True),
            root.register_forward_hook(_ModuleHook(self._end_micro_batch)),
        ]
        for name, module in hooked.items():
            self._handles.append(module.register_forward_pre_hook(_ModuleHook(partial(self._enter, name))))
            # always_call: a forward that raises must not leave the hooks of autograd behind
            self._handles.append(module.register_forward_hook(_ModuleHook(self._leave), always_call=True))

    def remove(self) -> None:
        """Takes every hook off the modules. Graphs that are alive keep working."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._close_all()

    def _begin_micro_batch(self, _root: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # Calls are still open here only if the last forward was left by something that module hooks do not see,
        # such as KeyboardInterrupt.
        self._close_all()
        if torch.is_grad_enabled() and not _in_backward():
            self._offloader.begin_micro_batch()

    def _end_micro_batch(self, _root: nn.Module, _arguments: object, output: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not _in_backward():
            self._offloader.watch_backward(output)

    def _enter(self, name: str, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        scope = hooks = None
        if torch.is_grad_enabled() and _hooks_allowed():
            if _in_backward():
                # A checkpointed region runs again. What it saves is used at once, and a non-reentrant checkpoint
                # counts the saves that it sees: it must see as many as the first time.
                hooks = saved_tensors_hooks(KeptTensor, KeptTensor.tensor)
            else:
                scope = self._offloader.open_scope(name, module)
                hooks = saved_tensors_hooks(partial(self._pack, scope), self._offloader.unpack)
            hooks.__enter__()
        self._open_calls.stack.append(_OpenCall(module, scope, hooks))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._open_calls.stack
        # A hook of someone else may have raised before ours was reached: then this call was never entered.
        while any(call.module is module for call in stack):
            call = stack.pop()
            self._close(call)
            if call.module is module:
                return

    def _close_all(self) -> None:
        while self._open_calls.stack:
            self._close(self._open_calls.stack.pop())

    def _close(self, call: _OpenCall) -> None:
        if call.hooks is not None:
            call.hooks.__exit__()
        if call.scope is not None:
            self._offloader.close_scope(call.scope)

    def _pack(self, scope: Scope, tensor: torch.Tensor) -> object:
        # A backward that is run inside the unit's forward saves tensors of its own, for its own use.
        return KeptTensor(tensor) if _in_backward() else self._offloader.pack(scope, tensor)


class _ModuleHook:
    """A hook that is not copied with its module: a deep copy or a pickle of the module is not attached."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _hooks_allowed() -> bool:
    # torch.func transforms forbid saved-tensor hooks while they run
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]
