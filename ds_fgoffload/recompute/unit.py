"""A unit under ``recompute``: how its forward is run once more, in the first call to try it, and then in backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ds_fgoffload.compat.private import graph_task_id, tree_leaves
from ds_fgoffload.device.streams import Streams
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.recompute.call import Made, RecomputedCall, cut_off, flatten, unflatten
from ds_fgoffload.recompute.conditions import Conditions
from ds_fgoffload.recompute.cost import RecomputeCost, TimeMark
from ds_fgoffload.recompute.read_state import ReadState, State
from ds_fgoffload.recompute.side_effects import state_tensors
from ds_fgoffload.saved.saved_tensors import KeptTensor
from ds_fgoffload.saved.tensors import Layout, is_parameter, is_plain, same_bits, storage_identity
from ds_fgoffload.stats import UnitStats, shown

SavedTensorHooks = Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], AbstractContextManager[Any]]
"""Those of autograd."""


class RecomputeContext:
    """What a unit needs of the attachment to run again.

    Args:
        streams: of the device.
        saving: autograd's hooks, which the module ``hooks`` alone imports.
        whole: ``whole(module)`` is a context in which the module's parameters are all there (ZeRO-3).
        cost: counts the time.
    """

    def __init__(
        self,
        streams: Streams,
        saving: SavedTensorHooks,
        whole: Callable[[nn.Module], AbstractContextManager[Any]],
        cost: RecomputeCost,
    ) -> None:
        self.streams = streams
        self.saving = saving
        self.whole = whole
        self.cost = cost
        self.lock = threading.RLock()
        self.running = threading.local()


class RecomputedUnit:
    """A module under ``recompute``."""

    def __init__(self, name: str, module: nn.Module, stats: UnitStats, context: RecomputeContext) -> None:
        self.name = name
        self._modules = tuple([weakref.ref(one) for one in module.modules()])
        self.stats = stats
        self.is_cheap = len(self._modules) == 1
        """So are norms and activation functions, as far as can be told."""
        stats.recompute = True
        self.streams = context.streams
        self.lock = context.lock
        self.outside: frozenset[int] = frozenset()
        """Saves that are tensors from elsewhere, found when the unit was tried."""
        self._surroundings = context
        self.is_watched = True
        """Whether its outputs and arguments are looked at for changes that count no version up: at first only."""
        self.runs_backward = False
        """Whether the forward runs a backward of its own, found when the unit was tried."""
        self._tried: set[tuple[bool, ...]] = set()
        self._read_state = ReadState()

    def is_tried(self, call: RecomputedCall) -> bool:
        """A module may do something else in training than in evaluation, so each combination of flags is tried."""
        return call.conditions.training in self._tried

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The module and all below it.

        They are held weakly: graphs hold the unit, and a module may hold a tensor of such a graph.

        Raises:
            OffloadStateError: one of them is gone, and only a graph is left.
        """
        found = tuple([module for ref in self._modules if (module := ref()) is not None])
        if len(found) != len(self._modules):
            raise OffloadStateError(
                f"{shown(self.name)} cannot be recomputed in backward: it, or a module in it, has been deleted or "
                "replaced since its forward; keep the model as it is until backward has run, or take it out of "
                "fine_grained_offload.recompute"
            )
        return found

    @property
    def module(self) -> nn.Module:
        return self.modules[0]

    def state(self) -> State:
        return self._read_state.now(self.modules)

    def difference(self, before: State) -> str:
        return self._read_state.difference(self.modules, before)

    def begin(self) -> TimeMark:
        return self._surroundings.cost.now()

    def made_again(self, tensors: Sequence[torch.Tensor], began: TimeMark) -> None:
        self._surroundings.cost.end(self.name, began)
        own = {storage_identity(tensor) for tensor in state_tensors(self.modules) if is_plain(tensor)}
        sizes = {storage_identity(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        self.stats.recomputed_bytes += sum(size for identity, size in sizes.items() if identity not in own)
        self.stats.recomputations += 1

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], conditions: Conditions) -> Made:
        saved: list[torch.Tensor] = []
        modules = self.modules
        backward = graph_task_id()

        def collect(tensor: torch.Tensor) -> KeptTensor:
            # not what a backward inside the forward saves for itself
            if not is_parameter(tensor) and graph_task_id() == backward:
                saved.append(tensor.detach())
            return KeptTensor(tensor)

        around = self._surroundings
        running = around.running
        was_running = getattr(running, "now", False)
        running.now = True
        try:
            # Not module(): the hooks of others on the module itself are not part of the unit, and ran in forward.
            with (
                conditions.restored(modules),
                around.whole(modules[0]),
                around.saving(collect, KeptTensor.tensor),
            ):
                output = modules[0].forward(*args, **kwargs)
        finally:
            running.now = was_running
        return [tensor.detach() for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor)], saved

    def try_again(
        self,
        call: RecomputedCall,
        given: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Sequence[torch.Tensor],
    ) -> str:
        """Why the call that has just ended could not be made again, found by doing so; empty if it can.

        Args:
            call: its forward has ended.
            given: the arguments when it began, flat.
            args: the arguments when it ended.
            kwargs: those by name.
            made: the tensors of its output.
        """
        leaves, structure = flatten(args, kwargs)
        if len(leaves) != len(given) or not all(map(_is_same, leaves, given)):
            return "something changes its arguments between its forward pre-hooks and its forward"
        detached = [
            cut_off(leaf, requires_grad=leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        before = call.saved()
        try:
            again, saved = self.forward(*unflatten(detached, structure), call.conditions)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the call itself has succeeded
            return f"it fails when it is run again: {type(error).__name__}: {error}"
        if len(saved) != len(before) or not all(map(same_bits, saved, before)):
            return "it does not save the same tensors when it is run again with the same arguments"
        if len(again) != len(made) or not all(map(same_bits, again, made)):
            return "it does not give the same output when it is run again with the same arguments"
        identities = [
            (storage_identity(one), storage_identity(other)) for one, other in zip(saved, before, strict=True)
        ]
        from_arguments = {storage_identity(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.outside = frozenset(
            n for n, (one, two) in enumerate(identities) if one == two and one not in from_arguments
        )
        self.runs_backward |= call.ran_backward
        self._tried.add(call.conditions.training)
        return ""


def _is_same(one: object, other: object) -> bool:
    """The same object, or two tensors over the same memory, as backward hooks on a module make them."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return storage_identity(one) == storage_identity(other) and Layout.of(one) == Layout.of(other)
    return one is other
