"""Units under ``recompute``: which calls are made again in backward, and who saves a promise instead of an output.

The hooks say when a unit is called and what is saved outside of it. A unit is tried in its first call: it runs once
more at once, and what it saved and gave is compared bit by bit. What fails is refused, by name and with the reason, and
keeps what it saves. Nothing is dropped before the call has ended and was found to be in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import is_not
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from ds_fgoffload.compiled import is_compiled
from ds_fgoffload.conditions import Conditions
from ds_fgoffload.purity import (
    Traces,
    is_plain,
    objection_to,
    same_bits,
    state_of,
    state_tensors,
    version_of,
)
from ds_fgoffload.recompute_cost import RecomputeCost
from ds_fgoffload.remade import Argument, Made, Output, RecomputedCall, Remade, cut_off, flatten, unflatten
from ds_fgoffload.saved import KeptTensor
from ds_fgoffload.stats import UnitStats, shown
from ds_fgoffload.streams import Streams

SavedTensorHooks = Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], AbstractContextManager[Any]]
"""``torch.autograd.graph.saved_tensors_hooks``, which the hooks alone import."""


class Surroundings:
    """What a unit needs of the attachment to run again.

    Args:
        streams: of the device.
        saved_tensors_hooks: autograd's.
        whole: ``whole(module)`` is a context in which the module's parameters are all there (ZeRO-3).
        cost: counts the time.
    """

    def __init__(
        self,
        streams: Streams,
        saved_tensors_hooks: SavedTensorHooks,
        whole: Callable[[nn.Module], AbstractContextManager[Any]],
        cost: RecomputeCost,
    ) -> None:
        self.streams = streams
        self.saved_tensors_hooks = saved_tensors_hooks
        self.whole = whole
        self.cost = cost
        self.lock = threading.RLock()
        self.running = threading.local()


class RecomputedUnit:
    """A module under ``recompute``."""

    def __init__(self, name: str, module: nn.Module, stats: UnitStats, surroundings: Surroundings) -> None:
        self.name = name
        self.module = module
        self.stats = stats
        self.modules = tuple(module.modules())
        self.streams = surroundings.streams
        self.lock = surroundings.lock
        self.outside: frozenset[int] = frozenset()
        """Saves that are tensors from elsewhere, found when the unit was tried."""
        self._surroundings = surroundings
        self._tried: set[tuple[bool, ...]] = set()

    def is_tried(self, call: RecomputedCall) -> bool:
        """A module may do something else in training than in evaluation, so each combination of flags is tried."""
        return call.conditions.training in self._tried

    def state(self) -> object:
        return state_of(self.modules)

    def begin(self) -> Any:
        return self._surroundings.cost.begin()

    def made_again(self, tensors: Sequence[torch.Tensor], began: Any) -> None:
        self._surroundings.cost.end(self.name, began)
        own = {tensor.untyped_storage()._cdata for tensor in state_tensors(self.modules) if is_plain(tensor)}
        sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        self.stats.recomputed_bytes += sum(size for identity, size in sizes.items() if identity not in own)
        self.stats.recomputations += 1

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], conditions: Conditions) -> Made:
        saved: list[torch.Tensor] = []
        backward = torch._C._current_graph_task_id()

        def collect(tensor: torch.Tensor) -> KeptTensor:
            # not what a backward inside the forward saves for itself
            if not isinstance(tensor, Parameter) and torch._C._current_graph_task_id() == backward:
                saved.append(tensor.detach())
            return KeptTensor(tensor)

        around = self._surroundings
        running = around.running
        was_running = getattr(running, "now", False)
        running.now = True
        try:
            # Not module(): the hooks of others on the module itself are not part of the unit, and ran in forward.
            with (
                conditions.restored(),
                around.whole(self.module),
                around.saved_tensors_hooks(collect, KeptTensor.tensor),
            ):
                output = self.module.forward(*args, **kwargs)
        finally:
            running.now = was_running
        return [tensor.detach() for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor)], saved

    def try_again(self, opened: OpenedCall, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[Any]) -> str:
        """Why the call that has just ended could not be made again, found by doing so; empty if it can."""
        call = opened.call
        leaves, structure = flatten(args, kwargs)
        if len(leaves) != len(opened.leaves) or any(map(is_not, leaves, opened.leaves)):
            return "another forward pre-hook changes its arguments"
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
        identities = [(_identity(one), _identity(other)) for one, other in zip(saved, before, strict=True)]
        given = {_identity(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.outside = frozenset(n for n, (one, two) in enumerate(identities) if one == two and one not in given)
        self._tried.add(call.conditions.training)
        return ""


class OpenedCall:
    """A call whose forward is running."""

    __slots__ = ("call", "leaves", "traces", "unit", "versions")

    def __init__(self, unit: RecomputedUnit, call: RecomputedCall, leaves: Sequence[Any]) -> None:
        self.unit = unit
        self.call = call
        self.leaves = leaves
        self.versions = _versions(leaves)
        self.traces = None if unit.is_tried(call) else Traces(unit.modules)


class Recomputer:
    """All units under ``recompute`` of one attachment.

    Args:
        modules: the units, by name.
        stats: their counts; ``counted`` are those whose calls somebody else counts.
        device: the one that is trained on.
        surroundings: what the units need to run again.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        stats: Mapping[str, UnitStats],
        counted: Collection[str],
        device: torch.device,
        surroundings: Surroundings,
    ) -> None:
        self.units = {name: RecomputedUnit(name, modules[name], stats[name], surroundings) for name in modules}
        self._counted = counted
        self._device = device
        self._around = surroundings
        self._outputs: dict[int, tuple[Output, RecomputedCall]] = {}
        self._in_forward = False

    @property
    def is_running(self) -> bool:
        """True while a unit runs once more, in this thread."""
        return getattr(self._around.running, "now", False)

    @property
    def is_needed(self) -> bool:
        """False once every unit was refused."""
        return any(not unit.stats.recompute_refused for unit in self.units.values())

    def forward_began(self) -> None:
        """The forward of a micro-batch begins: outputs of units are promised until it ends."""
        self._around.cost.micro_batch_began()
        self._outputs.clear()
        self._in_forward = True

    def forward_ended(self) -> None:
        self._outputs.clear()
        self._in_forward = False

    def read_cost(self) -> None:
        """Counts the times of what the device has done."""
        self._around.cost.read()

    def open(
        self,
        unit: RecomputedUnit,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
    ) -> OpenedCall | None:
        """``unit`` is called with gradients enabled; its arguments are held by what ``pack`` makes of them.

        None: this call is run as if the unit were not under ``recompute``.
        """
        if unit.name not in self._counted:
            unit.stats.calls += 1
        if unit.stats.recompute_refused:
            return None
        leaves, structure = flatten(args, kwargs)
        objection = objection_to(leaves, "it is given")
        if objection is None and any(map(is_compiled, unit.modules)):
            objection = "torch.compile has compiled it, or a module in it"
        if objection is not None:
            self.refuse(unit, objection)
            return None
        if any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in leaves):
            return None  # nothing that is saved here could be made in backward: autograd refuses such tensors
        self._forget_what_is_gone()
        held = [Argument(leaf, pack(leaf), unpack) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        call = RecomputedCall(unit, held, structure, Conditions(unit.modules, self._device))
        return OpenedCall(unit, call, leaves)

    def close(self, opened: OpenedCall, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """The unit has returned ``output``."""
        unit, call = opened.unit, opened.call
        leaves = [output] if type(output) is torch.Tensor else tree_leaves(output)
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        objection = objection_to(leaves, "it returns")
        if objection is None and _versions(opened.leaves) != opened.versions:
            objection = "its forward changes an argument in place"
        if objection is None and opened.traces is not None:
            objection = opened.traces.found()
        if objection is None and unit.state() != call.state:
            objection = "its forward changes a parameter or buffer in place"
        call.conditions.forget_unused_random()
        if objection is None and opened.traces is not None:
            try:
                objection = unit.try_again(opened, args, kwargs, made) or None
            except torch.OutOfMemoryError:  # it is tried at its next call
                call.keep()
                return
        if objection is not None:
            call.keep()
            self.refuse(unit, objection)
            return
        given = {_identity(leaf) for leaf in opened.leaves if isinstance(leaf, torch.Tensor)}
        given.update(_identity(tensor) for tensor in state_tensors(unit.modules) if is_plain(tensor))
        outputs: list[Output] = []
        for number, tensor in enumerate(made):
            if _identity(tensor) not in given and tensor.untyped_storage().nbytes():
                outputs.append(Output(tensor, number))
                given.add(outputs[-1].identity)
        call.settle(made, outputs, unit.outside)
        if self._in_forward:
            self._outputs.update((output.identity, (output, call)) for output in outputs)

    def promise(self, tensor: torch.Tensor) -> Remade | None:
        """What stands for ``tensor``, saved outside the unit that gave it; None if no unit did."""
        if not self._outputs or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        try:
            found = self._outputs.get(_identity(tensor))
        except NotImplementedError:  # the wrappers of torch.func have no storage
            return None
        if found is None:
            return None
        output, call = found
        return call.promise(output, tensor) if is_plain(tensor) and output.covers(tensor) else None

    def refuse(self, unit: RecomputedUnit, reason: str) -> None:
        """From now on the unit keeps what it saves."""
        unit.stats.recompute_refused = reason
        logger.warning(
            f"fine_grained_offload.recompute: {shown(unit.name)} ({type(unit.module).__name__}) is not recomputed: "
            f'{reason}; it keeps what it saves. Take it out of "recompute", or use activation checkpointing'
        )

    def _forget_what_is_gone(self) -> None:
        gone = [identity for identity, (output, _) in self._outputs.items() if output.is_gone()]
        for identity in gone:
            del self._outputs[identity]


def _identity(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [version_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
