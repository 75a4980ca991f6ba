"""Units under ``recompute``: which calls are made again in backward, and who saves a promise instead of an output.

The hooks say when a unit is called and what is saved outside of it. A unit is tried in its first call: it runs once
more at once, and what it saved and gave is compared bit by bit. What fails is refused, by name and with the reason, and
keeps what it saves. Nothing is dropped before the call has ended and was found to be in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_fgoffload.compat.compiled import is_compiled
from ds_fgoffload.compat.private import torch_function_depth, tree_leaves
from ds_fgoffload.recompute.call import Argument, Output, RecomputedCall, RecomputedTensor, flatten
from ds_fgoffload.recompute.conditions import Conditions
from ds_fgoffload.recompute.read_state import CHANGED, REPLACED
from ds_fgoffload.recompute.side_effects import GivenGradients, SideEffects, objection_to, state_tensors
from ds_fgoffload.recompute.unit import RecomputeContext, RecomputedUnit
from ds_fgoffload.saved.tensors import is_plain, storage_identity, version_of
from ds_fgoffload.schedule.plan import Plan
from ds_fgoffload.stats import UnitStats, shown
from ds_fgoffload.text.messages import warn
from ds_fgoffload.text.names import abbreviated

_COMPILED = "torch.compile has compiled it, or a module in it"
_OVERWRITTEN = (
    "its output is overwritten afterwards by something that does not increase the version counter (a collective in "
    "place, a kernel that writes over its input)"
)
LONGEST_ROW = 2
"""Most calls that are made again in a row because the output of each is the argument of the next."""


class OpenedCall:
    """A call whose forward is running."""

    __slots__ = ("call", "gradients", "leaves", "traces", "unit", "versions")

    def __init__(self, unit: RecomputedUnit, call: RecomputedCall, leaves: Sequence[Any]) -> None:
        self.unit = unit
        self.call = call
        self.leaves = leaves
        self.versions = _versions(leaves)
        if unit.is_watched:
            call.watch(leaves)
        self.traces = None if unit.is_tried(call) else SideEffects(unit.modules)
        self.gradients = GivenGradients(unit.modules) if self.traces is not None or unit.runs_backward else None

    def objection(self, output: Sequence[Any]) -> str | None:
        """Why the call, which has returned ``output``, cannot be made again; None: nothing is seen that speaks against.

        Args:
            output: flat.
        """
        objection = None if self.gradients is None else self.gradients.found()
        if objection is None and self.call.ran_backward and self.gradients is None:
            objection = "its forward runs a backward, which it did not when it was tried"
        if objection is None:
            objection = objection_to(output, "it returns")
        if objection is None and _versions(self.leaves) != self.versions:
            objection = "its forward changes an argument in place"
        if objection is None and self.traces is not None:
            objection = self.traces.found()
        if objection is None:
            objection = self.call.objection()
        if objection is None and self.unit.state() != self.call.state:
            difference = self.unit.difference(self.call.state)
            if difference in (CHANGED, REPLACED):
                objection = "its forward changes a parameter or buffer in place"
            else:
                objection = f"its forward changes what it reads: {difference}"
        return objection

    def abandon(self) -> None:
        """The forward has not returned: what was saved stays, until the graph goes."""
        if self.gradients is not None:
            self.gradients.end()
        self.call.keep()


class Recomputer:
    """All units under ``recompute`` of one attachment.

    Args:
        modules: the units, by name.
        stats: their counts; ``counted`` are those whose calls somebody else counts.
        plan: says which of them are recomputed.
        device: the one that is trained on.
        context: what the units need to run again.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        stats: Mapping[str, UnitStats],
        counted: Collection[str],
        plan: Plan,
        device: torch.device,
        context: RecomputeContext,
    ) -> None:
        self.units = {name: RecomputedUnit(name, modules[name], stats[name], context) for name in modules}
        self._counted = frozenset(counted)  # names alone: graphs hold this, and must hold no module
        self._plan = plan
        self._device = device
        self._around = context
        self._outputs: dict[int, tuple[Output, RecomputedCall]] = {}
        self._in_forward = False
        self._seen: set[RecomputedUnit] = set()
        self._in_vain: set[RecomputedUnit] = set()
        self._refused: dict[str, list[RecomputedUnit]] = {}

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
        for unit in self.units.values():  # from torch 2.15 on the hooks of a compiled module may lie in its graph
            if not unit.stats.recompute_refused and any(map(is_compiled, unit.modules)):
                self.refuse(unit, _COMPILED)

    def forward_ended(self) -> None:
        self._outputs.clear()
        for unit in self._seen - self._in_vain:
            unit.is_watched = False
        self._seen.clear()
        self._in_vain.clear()
        self._in_forward = False
        self._tell_what_is_refused()

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

        An argument that another unit has given is promised if that is cheap to make. Else it is held: in a row of
        layers that are all recomputed, backward of the last would make them all again at once.

        None: this call is run as if the unit were not under ``recompute``.
        """
        if unit.name not in self._counted:
            unit.stats.calls += 1
        if unit.stats.recompute_refused or not self._plan.recomputes(unit.name):
            return None
        leaves, structure = flatten(args, kwargs)
        objection = objection_to(leaves, "it is given")
        if objection is None and any(map(is_compiled, unit.modules)):
            objection = _COMPILED
        if objection is None and torch_function_depth():
            objection = "it runs under a torch-function mode, which backward's threads do not have"
        if objection is not None:
            self.refuse(unit, objection)
            return None
        if any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in leaves):
            return None  # nothing that is saved here could be made in backward: autograd refuses such tensors
        self._forget_what_is_gone()
        depth = 0
        held = list(leaves)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                promise = self.promise(leaf)
                if promise is not None and not (promise.call.is_cheap and promise.call.depth < LONGEST_ROW):
                    promise = None
                depth = depth if promise is None else max(depth, promise.call.depth + 1)
                held[number] = Argument(leaf, pack(leaf) if promise is None else promise, unpack)
        call = RecomputedCall(unit, held, structure, Conditions(unit.modules, self._device), depth)
        return OpenedCall(unit, call, leaves)

    def close(self, opened: OpenedCall, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """The unit has returned ``output``, or None, also when it has raised."""
        if output is None:
            opened.abandon()
            return
        unit, call = opened.unit, opened.call
        leaves = [output] if type(output) is torch.Tensor else tree_leaves(output)
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        call.conditions.forget_unused_random()
        objection = opened.objection(leaves)
        if objection is None and opened.traces is not None:
            try:
                objection = unit.try_again(call, opened.leaves, args, kwargs, made) or None
            except torch.OutOfMemoryError:  # it is tried at its next call
                call.keep()
                return
        if objection is not None:
            call.keep()
            self.refuse(unit, objection)
            return
        given = {storage_identity(leaf) for leaf in opened.leaves if isinstance(leaf, torch.Tensor)}
        given.update(storage_identity(tensor) for tensor in state_tensors(unit.modules) if is_plain(tensor))
        outputs: list[Output] = []
        for number, tensor in enumerate(made):
            if storage_identity(tensor) not in given and tensor.untyped_storage().nbytes():
                outputs.append(Output(tensor, number, is_watched=unit.is_watched))
                given.add(outputs[-1].identity)
        if unit.is_watched:
            self._seen.add(unit)
        call.settle(made, outputs, unit.outside)
        if self._in_forward:
            self._outputs.update((output.identity, (output, call)) for output in outputs)

    def promise(self, tensor: torch.Tensor) -> RecomputedTensor | None:
        """What stands for ``tensor``, saved outside the unit that gave it; None if no unit did."""
        if not self._outputs or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        try:
            found = self._outputs.get(storage_identity(tensor))
        except NotImplementedError:  # the wrappers of torch.func have no storage
            return None
        if found is None:
            return None
        output, call = found
        if not is_plain(tensor) or not output.covers(tensor):
            return None
        if output.is_overwritten(tensor):
            self.refuse(self.units[call.unit], _OVERWRITTEN)
            return None
        if output.is_zero:
            self._in_vain.add(self.units[call.unit])
        return call.promise(output, tensor)

    def refuse(self, unit: RecomputedUnit, reason: str) -> None:
        """From now on the unit keeps what it saves."""
        unit.stats.recompute_refused = reason
        self._refused.setdefault(reason, []).append(unit)

    def _tell_what_is_refused(self) -> None:
        for reason, units in self._refused.items():
            names = abbreviated([shown(unit.name) for unit in units])
            classes = ", ".join(dict.fromkeys(type(unit.module).__name__ for unit in units))
            warn(
                f"fine_grained_offload.recompute: {names} ({classes}): not recomputed, because {reason}; what is saved "
                'there is kept. Take it out of "recompute", or use activation checkpointing'
            )
        self._refused.clear()

    def _forget_what_is_gone(self) -> None:
        gone = [identity for identity, (output, _) in self._outputs.items() if output.is_gone()]
        for identity in gone:
            del self._outputs[identity]


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [version_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
