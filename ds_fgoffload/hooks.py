"""Where a saved tensor enters and leaves: module hooks open a scope around a unit's call, autograd's hooks do the rest.

The only importer of ``torch.autograd.graph``, and the only one that knows of ``torch.compile``. A compiled graph calls
no hooks of the modules inside it. The hooks of the very module that was compiled run outside the graph, and autograd's
hooks see all that the graph saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch._dynamo
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ds_fgoffload.messages import warn_here
from ds_fgoffload.names import abbreviated
from ds_fgoffload.offloader import Offloader
from ds_fgoffload.saved import KeptTensor
from ds_fgoffload.scope import Scope

_T = TypeVar("_T")


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
        warn: where to say what is not offloaded.
    """

    def __init__(
        self,
        root: nn.Module,
        hooked: Mapping[str, nn.Module],
        offloader: Offloader,
        warn: Callable[[str], None] = warn_here,
    ) -> None:
        self.warn = warn
        _leave_hooks_uncompiled()
        self._offloader = offloader
        self._pack, self._unpack = _pack, offloader.unpack
        self._uncompiled_pack, self._uncompiled_unpack = _uncompiled(_pack), _uncompiled(offloader.unpack)
        self._keep = _uncompiled(_keep)
        self._kept = _uncompiled(KeptTensor.tensor)
        self._units = offloader.unit_stats
        self._only_recomputed: dict[str, None] = {}
        self._told_recomputed = False
        self._root = root
        self._root_has_returned = False
        self._open_calls = _OpenCalls()
        self._root_handles = (
            root.register_forward_pre_hook(ModuleHook(self._begin_micro_batch), prepend=True),
            root.register_forward_hook(ModuleHook(self._end_micro_batch)),
        )
        self._handles: dict[str, tuple[RemovableHandle, ...]] = {
            name: (
                module.register_forward_pre_hook(ModuleHook(partial(self._enter, name))),
                # always_call: a forward that raises must not leave the hooks of autograd behind
                module.register_forward_hook(ModuleHook(self._leave), always_call=True),
            )
            for name, module in hooked.items()
        }
        self._above = {name: _modules_above(name, root) for name in hooked}
        self._landmarks = self._hook_landmarks(hooked) if offloader.plans else ()
        self._unhook_compiled()

    def remove(self) -> None:
        """Takes every hook off the modules. Graphs that are alive keep working."""
        for handles in (self._root_handles, self._landmarks, *self._handles.values()):
            _remove(handles)
        self._handles.clear()
        self._close_all()

    def open_unit(self) -> str | None:
        """The innermost unit that is being called and offloads what is saved now."""
        for call in reversed(self._open_calls.stack):
            if call.scope is not None:
                return None if call.scope.excluded else call.scope.unit
        return None

    def _hook_landmarks(self, hooked: Mapping[str, nn.Module]) -> tuple[RemovableHandle, ...]:
        """Modules beside the units, and beside what those lie in: their calls are moments at which memory may leave."""
        if _compile_is_used():
            return ()
        above = dict.fromkeys(module for modules in self._above.values() for module in modules)
        beside = dict.fromkeys(child for module in above for child in module.children() if child not in above)
        landmarks = [module for module in beside if module not in set(hooked.values())]
        return tuple(
            module.register_forward_pre_hook(ModuleHook(partial(self._pass_by, number)))
            for number, module in enumerate(landmarks)
        )

    def _pass_by(self, number: int, *_: Any) -> None:
        if torch.is_grad_enabled() and not _in_backward():
            self._offloader.pass_by(number)

    def _unhook_compiled(self) -> None:
        """Says which modules are compiled away, and unhooks them: compiled code would be compiled anew for each.

        (Dynamo guards on the number of a hook that is always called, pytorch/torch/nn/modules/module.py, so that no two
        hooked modules could share a graph.)
        """
        lost = tuple(name for name in self._handles if _is_compiled_away(self._above[name]))
        if lost:
            _remove(self._landmarks)
            for name in lost:
                _remove(self._handles.pop(name))
                del self._above[name]
                if name in self._units:
                    self._units[name].compiled = True
            self.warn(
                f"fine_grained_offload: {abbreviated(lost)}: torch.compile has compiled what they lie in, and "
                "compiled code calls no hooks of the modules in it: such units are not offloaded, and such excluded "
                "modules not kept; select the compiled module itself, or compile modules inside the units"
            )
        self._compilable = {module for above in self._above.values() for module in above}

    def _begin_micro_batch(self, _root: nn.Module, *_: Any) -> None:
        # Calls are still open here only if the last forward was left by something that module hooks do not see,
        # such as KeyboardInterrupt.
        self._close_all()
        self._root_has_returned = False
        if any(module._compiled_call_impl is not None for module in self._compilable):
            self._unhook_compiled()
        self._tell_what_is_only_recomputed()
        if torch.is_grad_enabled() and not _in_backward():
            self._offloader.begin_micro_batch()

    def _end_micro_batch(self, _root: nn.Module, _arguments: object, output: object) -> None:
        self._root_has_returned = True
        self._watch(output)

    def _watch(self, output: object) -> None:
        if torch.is_grad_enabled() and not _in_backward():
            self._offloader.watch_backward(output)

    def _enter(self, name: str, module: nn.Module, *_: Any) -> None:
        scope = hooks = None
        if torch.is_grad_enabled() and _hooks_allowed():
            if _in_backward():
                # A checkpointed region runs again. What it saves is used at once, and a non-reentrant checkpoint
                # counts the saves that it sees: it must see as many as the first time.
                hooks = saved_tensors_hooks(self._keep, self._kept)
                self._note_recompute(name)
            else:
                scope = self._offloader.open_scope(name, module)
                # Where nothing is ever compiled, the third part of the host's time per saved tensor is spared.
                used = _compile_is_used()
                pack = self._uncompiled_pack if used else self._pack
                unpack = self._uncompiled_unpack if used else self._unpack
                hooks = saved_tensors_hooks(partial(pack, self._offloader, scope), unpack)
            hooks.__enter__()
        self._open_calls.stack.append(_OpenCall(module, scope, hooks))

    def _leave(self, module: nn.Module, _arguments: object, output: object) -> None:
        if self._root_has_returned and module is not self._root:  # a loss, whose backward begins in it
            self._watch(output)
        stack = self._open_calls.stack
        # A hook of someone else may have raised before ours was reached: then this call was never entered.
        while any(call.module is module for call in stack):
            call = stack.pop()
            self._close(call)
            if call.module is module:
                return

    def _note_recompute(self, name: str) -> None:
        unit = self._units.get(name)
        if unit is not None:
            unit.recomputed_calls += 1
            if not unit.calls:
                self._only_recomputed[name] = None

    def _tell_what_is_only_recomputed(self) -> None:
        if self._only_recomputed and not self._told_recomputed:
            self._told_recomputed = True
            self.warn(
                f"fine_grained_offload: {abbreviated(self._only_recomputed)}: nothing is offloaded of units inside a "
                "reentrant checkpoint, because nothing is saved there before backward; use_reentrant=False lets them "
                "be offloaded instead of computed again, and a unit around the checkpoint offloads its inputs"
            )

    def _close_all(self) -> None:
        while self._open_calls.stack:
            self._close(self._open_calls.stack.pop())

    def _close(self, call: _OpenCall) -> None:
        if call.hooks is not None:
            call.hooks.__exit__()
        if call.scope is not None:
            self._offloader.close_scope(call.scope)


class ModuleHook:
    """A hook that is not copied with its module: a deep copy or a pickle of the module is not attached."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = _uncompiled(call)

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():  # what Dynamo sees of a hook that lies in a graph
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


def _pack(offloader: Offloader, scope: Scope, tensor: torch.Tensor) -> object:
    # A backward that is run inside the unit's forward saves tensors of its own, for its own use.
    return KeptTensor(tensor) if torch._C._current_graph_task_id() != -1 else offloader.pack(scope, tensor)


def _keep(tensor: torch.Tensor) -> KeptTensor:
    return KeptTensor(tensor)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _leave_hooks_uncompiled() -> None:
    """Keeps Dynamo from compiling a hook by itself; inside a graph it still sees one, and sees it do nothing.

    Dynamo does not compile ``nn.Module.__call__``, but goes on with what is called from there: hooks, then ``forward``.
    ``torch.compiler.disable`` would not do: a hook so marked breaks the graphs that it lies in.
    """
    # Not a public function. Without it results are the same, but Dynamo may try to compile the hooks.
    skip_code = getattr(torch._dynamo.eval_frame, "skip_code", None)
    if skip_code is not None:
        skip_code(ModuleHook.__call__.__code__)


def _uncompiled(function: Callable[..., _T]) -> Callable[..., _T]:
    """``function``, called by compiled code or by what Dynamo gave up on, is left as it is, with all that it calls."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def _compile_is_used() -> bool:
    """Whether anything in this process was ever given to ``torch.compile``."""
    backends = getattr(torch._dynamo.eval_frame, "cached_backends", {0: True})
    return any(backend is not None for backend in backends.values())  # None: torch.compiler.disable


def _modules_above(name: str, root: nn.Module) -> tuple[nn.Module, ...]:
    """What the module lies in, outermost first."""
    parts = name.split(".")
    return tuple(root.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))) if name else ()


def _is_compiled_away(above: Sequence[nn.Module]) -> bool:
    """Whether a module in ``above`` was compiled: by its ``compile()``, or by ``torch.compile``, which wraps it."""
    return any(module._compiled_call_impl is not None for module in above) or any(
        type(module).__name__ == "OptimizedModule" for module in above[:-1]
    )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _hooks_allowed() -> bool:
    # torch.func transforms forbid saved-tensor hooks while they run
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]
