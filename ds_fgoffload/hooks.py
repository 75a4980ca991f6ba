"""Where a saved tensor enters and leaves: module hooks open a scope around a unit's call, autograd's hooks do the rest.

The only importer of ``torch.autograd.graph``. Around a unit under ``recompute`` it stands in the innermost place, next
to the module's own ``forward``; around the root's forward it looks for saves of what such units have given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ds_fgoffload import packing
from ds_fgoffload.compiled import (
    ModuleHook,
    Uncompiled,
    is_compiled,
    is_compiled_away,
    leave_hooks_uncompiled,
    modules_above,
)
from ds_fgoffload.garbage import collect_young
from ds_fgoffload.messages import warn_here
from ds_fgoffload.names import abbreviated
from ds_fgoffload.offloader import Offloader
from ds_fgoffload.open_calls import OpenCall, OpenCalls
from ds_fgoffload.plan import Plan
from ds_fgoffload.recompute import Recomputer
from ds_fgoffload.recompute_cost import RecomputeCost
from ds_fgoffload.recomputed_unit import RecomputedUnit, Surroundings
from ds_fgoffload.saved import KeptTensor
from ds_fgoffload.stats import UnitStats
from ds_fgoffload.transfer import streams_on


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
        self._packing = packing.Packing(offloader, recomputer, self._open_calls)
        self._pack = Uncompiled(self._packing.pack)
        self._unpack = Uncompiled(offloader.unpack if recomputer is None else self._packing.unpack)
        self._keep = Uncompiled(packing.keep)
        self._kept = Uncompiled(KeptTensor.tensor)
        self._units = offloader.unit_stats
        self._only_recomputed: dict[str, None] = {}
        self._told_recomputed = False
        self._root = root
        self._root_has_returned = False
        self._root_handles: tuple[RemovableHandle, ...] = (
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
        if packing.may_save() and not self._runs_again():
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

    def _begin_micro_batch(self, _root: nn.Module, *_: Any) -> None:
        # Calls are still open here only if the last forward was left by something that module hooks do not see,
        # such as KeyboardInterrupt.
        self._open_calls.close_all()
        self._root_has_returned = False
        if any(module._compiled_call_impl is not None for module in self._compilable):
            self._unhook_compiled()
        self._tell_what_is_only_recomputed()
        if packing.may_save():
            if self._offloader.begin_micro_batch():
                collect_young()
            if self._recomputer is not None and self._recomputer.is_needed and self._takes_what_is_saved():
                self._enter_root(self._recomputer)

    def _end_micro_batch(self, _root: nn.Module, _arguments: object, output: object) -> None:
        self._root_has_returned = True
        self._watch(output)

    def _watch(self, output: object) -> None:
        if packing.may_save():
            self._offloader.watch_backward(output)

    def _enter(self, name: str, module: nn.Module, *_: Any) -> None:
        scope = hooks = None
        if torch.is_grad_enabled() and packing.hooks_allowed():
            again = self._runs_again()
            if again or packing.in_backward():
                # A checkpointed region runs again. What it saves is used at once, and a non-reentrant checkpoint
                # counts the saves that it sees: it must see as many as the first time.
                hooks = saved_tensors_hooks(self._keep, self._kept)
                if not again:
                    self._note_recompute(name)
            else:
                scope = self._offloader.open_scope(name, module)
                hooks = saved_tensors_hooks(self._pack, self._unpack)
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
            module._forward_pre_hooks.move_to_end(before.id)
            module._forward_hooks.move_to_end(after.id, last=False)
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
        if not packing.may_save() or self._runs_again():
            return False
        return not self._open_calls.is_recomputed() and self._takes_what_is_saved()

    def _runs_again(self) -> bool:
        """Whether a unit under recompute is being made again."""
        return self._recomputer is not None and self._recomputer.is_running

    def _takes_what_is_saved(self) -> bool:
        """False where somebody else has put hooks around: a checkpoint counts what it sees, now and in backward."""
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003
        return top is None or top[1] is self._unpack

    def _leave_recomputed(
        self, unit: RecomputedUnit, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        call = self._open_calls.close(unit)
        if call is not None and call.recomputed is not None and self._recomputer is not None:
            self._recomputer.close(call.recomputed, args, kwargs, output)

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
    """What recomputes ``modules``; None if there are none. The arguments are those of Recomputer and Surroundings."""
    if not modules:
        return None
    streams = streams_on(device)
    surroundings = Surroundings(streams, saved_tensors_hooks, whole, RecomputeCost(stats, streams))
    return Recomputer(modules, stats, counted, plan, device, surroundings)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
