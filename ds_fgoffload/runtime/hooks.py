"""Where a saved tensor enters and leaves: module hooks open a scope around a unit's call, autograd's hooks do the rest.

:class:`ModuleHooks` puts the hooks on the modules; :class:`OpenCalls` knows the calls that have not returned, and
closes them when they do, or when something goes wrong; :class:`Packing` says what autograd holds of a tensor that it
saves: in a unit, in a recomputed one, as its argument, and elsewhere.

With ``inspection/watcher.py``, which moves nothing, the only importer of ``torch.autograd.graph``. Around a unit under
``recompute`` it stands in the innermost place, next to the module's own ``forward``; around the root's forward it looks
for saves of what such units have given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ds_fgoffload.compat.compiled import (
    ModuleHook,
    Uncompiled,
    is_compiled,
    is_compiled_away,
    leave_hooks_uncompiled,
    modules_above,
)
from ds_fgoffload.compat.private import (
    FORWARD_HOOKS,
    FORWARD_PRE_HOOKS,
    compiled_call,
    graph_task_id,
    saved_tensors_hooks_are_allowed,
    top_saved_tensors_hooks,
    tree_leaves,
)
from ds_fgoffload.recompute.call import RecomputedTensor
from ds_fgoffload.recompute.cost import RecomputeCost
from ds_fgoffload.recompute.recomputer import OpenedCall, Recomputer
from ds_fgoffload.recompute.unit import RecomputeContext, RecomputedUnit
from ds_fgoffload.runtime.garbage_collection import collect_young
from ds_fgoffload.runtime.offloader import Offloader, Scope
from ds_fgoffload.saved.saved_tensors import KeptTensor
from ds_fgoffload.saved.transfer import streams_on
from ds_fgoffload.schedule.plan import Plan
from ds_fgoffload.stats import UnitStats, shown
from ds_fgoffload.text.messages import warn_here
from ds_fgoffload.text.names import abbreviated


class OpenCall(NamedTuple):
    """A call that has begun."""

    owner: object
    """The module; of a unit under ``recompute`` the unit, of the root's forward its hooks."""
    scope: Scope | None
    hooks: AbstractContextManager[Any] | None
    """Autograd's, while they are entered."""
    recomputed: OpenedCall | None = None


class OpenCalls(threading.local):
    """A stack, outermost first; each thread runs its own."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._stack: list[OpenCall] = []

    def append(self, call: OpenCall) -> None:
        self._stack.append(call)

    def scope(self) -> Scope | None:
        """The innermost."""
        return next((call.scope for call in reversed(self._stack) if call.scope is not None), None)

    def saving(self) -> OpenCall | None:
        """The innermost around which autograd's hooks are entered."""
        return next((call for call in reversed(self._stack) if call.hooks is not None), None)

    def is_recomputed(self) -> bool:
        """Whether one of them will be made again in backward, with all that is in it."""
        return any(call.recomputed is not None for call in self._stack)

    def close(self, owner: object) -> OpenCall | None:
        """Closes the owner's call, and calls in it that were left open.

        None: it was never entered, because a hook of someone else raised before.
        """
        while any(call.owner is owner for call in self._stack):
            call = self._close_last()
            if call.owner is owner:
                return call
            _abandon(call)
        return None

    def close_all(self) -> None:
        while self._stack:
            _abandon(self._close_last())

    def _close_last(self) -> OpenCall:
        call = self._stack.pop()
        if call.hooks is not None:
            call.hooks.__exit__(None, None, None)
        if call.scope is not None:
            self._offloader.close_scope(call.scope)
        return call


def _abandon(call: OpenCall) -> None:
    if call.recomputed is not None:
        call.recomputed.abandon()


class Packing:
    """The pack and unpack hooks, the same for all calls: the stack of open calls tells which one runs.

    (Autograd keeps with each saved tensor the hooks that it was saved under. A pair for each call would be as many
    objects more that Python's collector goes through.)

    Args:
        recomputer: outputs of its units are replaced by placeholders; None: there are no such units.
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
        return packed.tensor() if type(packed) is RecomputedTensor else self._offloader.unpack(packed)


def keep(tensor: torch.Tensor) -> KeptTensor:
    """Saved where nothing may move."""
    return KeptTensor(tensor)


def in_backward() -> bool:
    """Whether a backward runs in this thread."""
    return bool(graph_task_id() != -1)


def may_save() -> bool:
    """Whether what runs now in this thread may save tensors for a later backward, and autograd tells of them."""
    return torch.is_grad_enabled() and hooks_allowed() and not in_backward()


def hooks_allowed() -> bool:
    """Whether autograd takes saved-tensor hooks now."""
    # torch.func transforms forbid saved-tensor hooks while they run
    return bool(saved_tensors_hooks_are_allowed())


class ModuleHooks:
    """The hooks of one attachment on its modules.

    Args:
        root: its forward begins a micro-batch.
        hooked: units, and excluded modules inside them, by name.
        offloader: gets every event.
        warn: where to say what is not offloaded.
        recomputer: its units are hooked too.
    """

    def __init__(
        self,
        root: nn.Module,
        hooked: Mapping[str, nn.Module],
        offloader: Offloader,
        warn: Callable[[str], None] = warn_here,
        recomputer: Recomputer | None = None,
    ) -> None:
        self.warn = warn
        leave_hooks_uncompiled()
        self._offloader = offloader
        self._recomputer = recomputer
        self._open_calls = OpenCalls(offloader)
        self._packing = Packing(offloader, recomputer, self._open_calls)
        self._pack = Uncompiled(self._packing.pack)
        self._unpack = Uncompiled(offloader.unpack if recomputer is None else self._packing.unpack)
        self._keep = Uncompiled(keep)
        self._kept = Uncompiled(KeptTensor.tensor)
        self._units = offloader.unit_stats
        self._only_recomputed: dict[str, None] = {}
        self._told_recomputed = False
        self._told_hooks = False
        self._root = root
        self._root_has_returned = False
        self._root_handles: tuple[RemovableHandle, ...] = (
            root.register_forward_pre_hook(ModuleHook(self._begin_micro_batch), prepend=True, with_kwargs=True),
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
        recomputed = {} if recomputer is None else recomputer.units
        self._recompute_handles = {name: self._hook_recomputed(unit) for name, unit in recomputed.items()}
        if recomputer is not None:
            self._root_handles += (root.register_forward_hook(ModuleHook(self._leave_root), always_call=True),)
        self._above = {name: modules_above(name, root) for name in {**hooked, **recomputed}}
        self._landmarks = self._hook_landmarks(hooked) if offloader.plans else ()
        self._unhook_compiled()

    def remove(self) -> None:
        """Takes every hook off the modules. Graphs that are alive keep working."""
        recomputed = self._recompute_handles
        for handles in (self._root_handles, self._landmarks, *self._handles.values(), *recomputed.values()):
            _remove(handles)
        self._handles.clear()
        self._recompute_handles.clear()
        self._open_calls.close_all()

    def open_unit(self) -> str | None:
        """The innermost unit that is being called and offloads what is saved now."""
        scope = self._open_calls.scope()
        return None if scope is None or scope.excluded else scope.unit

    def _hook_landmarks(self, hooked: Mapping[str, nn.Module]) -> tuple[RemovableHandle, ...]:
        """Modules beside the units, and beside what those lie in: their calls are moments at which memory may leave."""
        above = dict.fromkeys(module for modules in self._above.values() for module in modules)
        others = {*above, *hooked.values()}
        beside = dict.fromkeys(
            child for module in above for child in module.children() if child not in others and not is_compiled(child)
        )
        return tuple(
            module.register_forward_pre_hook(ModuleHook(partial(self._pass_by, number)))
            for number, module in enumerate(beside)
        )

    def _pass_by(self, number: int, *_: Any) -> None:
        if may_save() and not self._runs_again():
            self._offloader.pass_by(number)

    def _unhook_compiled(self) -> None:
        """Says which modules are compiled away, and unhooks them: compiled code would be compiled anew for each.

        (Dynamo guards on the number of a hook that is always called, pytorch/torch/nn/modules/module.py, so that no two
        hooked modules could share a graph.)
        """
        lost = tuple(name for name, above in self._above.items() if is_compiled_away(above))
        if lost:
            _remove(self._landmarks)
            for name in lost:
                _remove((*self._handles.pop(name, ()), *self._recompute_handles.pop(name, ())))
                del self._above[name]
                if name in self._units:
                    self._units[name].compiled = True
            self.warn(
                f"fine_grained_offload: {abbreviated(lost)}: torch.compile has compiled what they lie in, and "
                "compiled code calls no hooks of the modules in it: such units are neither offloaded nor "
                "recomputed, and such excluded modules not kept; select the compiled module itself, or compile "
                "modules inside the units"
            )
        self._compilable = {module for above in self._above.values() for module in above}

    def _begin_micro_batch(self, _root: nn.Module, arguments: object, named: object = None) -> None:
        # Calls are still open here only if the last forward was left by something that module hooks do not see,
        # such as KeyboardInterrupt.
        self._open_calls.close_all()
        self._root_has_returned = False
        if any(compiled_call(module) is not None for module in self._compilable):
            self._unhook_compiled()
        self._tell_what_is_only_recomputed()
        if may_save():
            if self._offloader.begin_micro_batch(_size((arguments, named))):
                collect_young()
            if self._recomputer is not None and self._recomputer.is_needed and self._takes_what_is_saved():
                self._enter_root(self._recomputer)

    def _end_micro_batch(self, _root: nn.Module, _arguments: object, output: object) -> None:
        self._root_has_returned = True
        self._watch(output)

    def _watch(self, output: object) -> None:
        if may_save():
            self._offloader.watch_backward(output)

    def _enter(self, name: str, module: nn.Module, *_: Any) -> None:
        scope = hooks = None
        if torch.is_grad_enabled() and hooks_allowed():
            again = self._runs_again()
            if again or in_backward():
                # A checkpointed region runs again. What it saves is used at once, and a non-reentrant checkpoint
                # counts the saves that it sees: it must see as many as the first time.
                hooks = saved_tensors_hooks(self._keep, self._kept)
                if not again:
                    self._note_recompute(name)
            elif _belong_to_user(_hooks_around()):
                self._leave_to_user_hooks(name)
            else:
                scope = self._offloader.open_scope(name, module)
                hooks = saved_tensors_hooks(self._pack, self._unpack)
            if hooks is not None:
                hooks.__enter__()
        self._open_calls.append(OpenCall(module, scope, hooks))

    def _leave(self, module: nn.Module, _arguments: object, output: object) -> None:
        if self._root_has_returned and module is not self._root:  # a loss, whose backward begins in it
            self._watch(output)
        self._open_calls.close(module)

    def _hook_recomputed(self, unit: RecomputedUnit) -> tuple[RemovableHandle, ...]:
        enter, leave = partial(self._enter_recomputed, unit), partial(self._leave_recomputed, unit)
        return (
            unit.module.register_forward_pre_hook(ModuleHook(enter), with_kwargs=True),
            unit.module.register_forward_hook(ModuleHook(leave), prepend=True, with_kwargs=True, always_call=True),
        )

    def _enter_root(self, recomputer: Recomputer) -> None:
        """Until the root's forward ends, what is saved outside the units may be the output of one under recompute."""
        for name, (before, after) in self._recompute_handles.items():  # others may have hooked the module since
            module: Any = recomputer.units[name].module
            getattr(module, FORWARD_PRE_HOOKS).move_to_end(before.id)
            getattr(module, FORWARD_HOOKS).move_to_end(after.id, last=False)
        recomputer.forward_began()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._open_calls.append(OpenCall(self, None, hooks))

    def _leave_root(self, *_: Any) -> None:
        if self._open_calls.close(self) is not None and self._recomputer is not None:
            self._recomputer.forward_ended()

    def _enter_recomputed(
        self, unit: RecomputedUnit, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        opened = hooks = None
        if self._is_to_recompute():
            assert self._recomputer is not None
            opened = self._recomputer.open(unit, args, kwargs, self._packing.pack_argument, self._unpack)
            if opened is not None:
                hooks = saved_tensors_hooks(self._pack, self._unpack)
                hooks.__enter__()
        self._open_calls.append(OpenCall(unit, None, hooks, opened))

    def _is_to_recompute(self) -> bool:
        """Not inside another such unit, nor where somebody else, such as a checkpoint, takes what is saved."""
        if not may_save() or self._runs_again():
            return False
        return not self._open_calls.is_recomputed() and self._takes_what_is_saved()

    def _runs_again(self) -> bool:
        """Whether a unit under recompute is being made again."""
        return self._recomputer is not None and self._recomputer.is_running

    def _takes_what_is_saved(self) -> bool:
        """False where somebody else has put hooks around: a checkpoint counts what it sees, now and in backward."""
        top = _hooks_around()
        return top is None or top[1] is self._unpack

    def _leave_recomputed(
        self, unit: RecomputedUnit, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        call = self._open_calls.close(unit)
        if call is not None and call.recomputed is not None and self._recomputer is not None:
            self._recomputer.close(call.recomputed, args, kwargs, output)

    def _leave_to_user_hooks(self, name: str) -> None:
        """Nothing is done here, so that the user's own hooks get the tensors: autograd asks the innermost alone."""
        if name in self._units:
            self._units[name].calls += 1
        if not self._told_hooks:
            self._told_hooks = True
            self.warn(
                f"fine_grained_offload: {shown(name)}: torch.autograd.graph.saved_tensors_hooks of your own are around "
                "it and take what is saved there, so nothing is offloaded inside them; enter them inside a module that "
                "is not selected, or leave them out"
            )

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


def recomputer_of(
    modules: Mapping[str, nn.Module],
    counted: Collection[str],
    stats: Mapping[str, UnitStats],
    plan: Plan,
    device: torch.device,
    whole: Callable[[nn.Module], AbstractContextManager[Any]],
) -> Recomputer | None:
    """What recomputes ``modules``; None if there are none. Arguments: see Recomputer and RecomputeContext."""
    if not modules:
        return None
    streams = streams_on(device)
    context = RecomputeContext(streams, saved_tensors_hooks, whole, RecomputeCost(stats, streams))
    return Recomputer(modules, stats, counted, plan, device, context)


_OF_CHECKPOINTS = frozenset({"torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing"})


def _hooks_around() -> tuple[Any, Any] | None:
    """Autograd's two hooks that are entered now, the innermost."""
    top: tuple[Any, Any] | None = top_saved_tensors_hooks(True)  # noqa: FBT003
    return top


def _belong_to_user(top: tuple[Any, Any] | None) -> bool:
    """Neither ours nor a checkpoint's, which only counts what is saved in it."""
    return top is not None and type(top[0]) is not Uncompiled and top[0].__module__ not in _OF_CHECKPOINTS


def _size(called_with: object) -> int:
    """Tokens, if it has a tensor of them: elements of the largest tensor of integers. Else elements of all tensors."""
    tensors = [leaf for leaf in tree_leaves(called_with) if isinstance(leaf, torch.Tensor)]
    tokens = max((one.numel() for one in tensors if one.dtype in _OF_TOKENS), default=0)
    return tokens or sum(one.numel() for one in tensors)


_OF_TOKENS = frozenset({torch.int64, torch.int32})


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
