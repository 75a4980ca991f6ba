"""What autograd holds instead of what a recomputed call saved, or of its output: something that the call makes again.

A *placeholder* stands for a tensor that the unit itself saved, a *promise* for a tensor over the unit's output that
somebody else saved. The first that is needed makes its call run again, which fills all that are still alive. Each owns
what it was filled with, so that it goes when autograd drops it. The call's arguments are kept flat, each held by
something that gives it back in backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from ds_fgoffload.compat.private import TreeSpec, tree_flatten, tree_unflatten, version_counter
from ds_fgoffload.device.streams import Streams
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.recompute.conditions import Conditions
from ds_fgoffload.recompute.read_state import CHANGED, REPLACED, State
from ds_fgoffload.recompute.side_effects import objection_to
from ds_fgoffload.saved.saved_tensors import KeptTensor, SavedStorage, changed_in_place
from ds_fgoffload.saved.tensors import Layout, checksum, is_parameter, is_plain, signature, storage_identity
from ds_fgoffload.saved.transfer import drop_memory
from ds_fgoffload.stats import shown


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


Made = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The tensors of a forward's output, and what it saved for backward, in order; all detached."""


class Output:
    """A storage of a call's output: recognised when it is saved, without being kept.

    One that is watched knows its values by their checksum: collectives, and kernels that write over their input, change
    a tensor without a new version.
    """

    __slots__ = ("_checksum", "_storage", "_version", "layout", "number", "size_bytes")

    def __init__(self, tensor: torch.Tensor, number: int, *, is_watched: bool) -> None:
        self._checksum = checksum(tensor) if is_watched else None
        self.number = number
        """The first tensor of the output over this storage."""
        self.layout = Layout.of(tensor)
        self._version = version_counter(tensor)
        self._storage = SavedStorage(tensor, None)
        self.size_bytes = self._storage.size_bytes
        drop_memory(self._storage.alias)

    @property
    def identity(self) -> int:
        return self._storage.original.identity

    def is_gone(self) -> bool:
        """True if the memory has been freed."""
        return self._storage.original.is_gone()

    def covers(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor``, over the same storage, has the values that the call gave it."""
        return self._storage.covers(tensor)

    @property
    def is_zero(self) -> bool:
        """True if the checksum tells of no change because all is zero: a sum over ranks of zeros is zero. Waits."""
        return self._checksum is not None and not bool(self._checksum.any())

    def is_overwritten(self, tensor: torch.Tensor) -> bool:
        """True if it is watched, and ``tensor``, over the same storage, has other values than the call wrote. Waits."""
        return self._checksum is not None and not torch.equal(checksum(self.layout.over(tensor)), self._checksum)

    def check(self, layout: Layout) -> None:
        """Raises ``RuntimeError``, as autograd would, if it was changed in place since."""
        version = version_counter(self._storage.alias)
        if version != self._version:
            raise RuntimeError(changed_in_place(layout, self._version, version))


class RecomputedTensor:
    """Stands for a tensor that ``call`` makes again; ``output`` is given if the tensor lies in an output's storage."""

    __slots__ = ("__weakref__", "_foreign", "call", "held", "layout", "output")

    def __init__(self, call: RecomputedCall, layout: Layout, output: Output | None, held: KeptTensor | None) -> None:
        self.call = call
        self.layout = layout
        self.output = output
        self.held = held
        self._foreign: tuple[Any, ...] = ()

    def tensor(self) -> torch.Tensor:
        """The tensor, made again if need be, ready for the caller's stream.

        Raises:
            RuntimeError: it was changed in place since it was saved, as autograd itself would have raised.
        """
        if self.output is not None:
            self.output.check(self.layout)
        if self.held is None:
            self.call.run_again()
        elif self.call.is_open:
            self.call.ran_backward = True
        assert self.held is not None
        compute = self.call.ready()
        if compute is not None and compute not in self._foreign:
            self._foreign = (*self._foreign, compute)
        return self.held.tensor()

    def __del__(self) -> None:
        if self._foreign:  # the memory goes back to the stream of the call, after its uses on others
            self.call.after(self._foreign)


class Runner(Protocol):
    """Runs a unit's forward once more, as its calls see it."""

    name: str
    streams: Streams
    lock: Any
    is_cheap: bool

    def state(self) -> State:
        """Differs when something that the forward reads does."""

    def difference(self, before: State) -> str:
        """What differs from a state before, in words."""

    def begin(self) -> Any:
        """A call begins to run again; what is returned goes to :meth:`made_again`."""

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], conditions: Conditions) -> Made:
        """The forward under these conditions."""

    def made_again(self, tensors: Sequence[torch.Tensor], began: Any) -> None:
        """The call has run; these tensors had been missing."""


class RecomputedCall:
    """One call of a unit under ``recompute``, from its begin until nothing that it can make again is alive.

    Args:
        runner: of the unit.
        leaves: the arguments, flat; tensors as :class:`Argument`.
        structure: how they lay in ``(args, kwargs)``.
        conditions: taken before the forward.
        depth: how many calls have to be made again before this one, each of which gives an argument of the next.
    """

    __slots__ = ("__weakref__", "_layouts", "_leaves", "_objection", "_outputs_count", "_promises", "_runner", "_saves",
                 "_settled_saves", "_state", "_stream", "_structure", "_watched", "conditions", "depth", "outputs",
                 "ran_backward")  # fmt: skip

    def __init__(
        self, runner: Runner, leaves: Sequence[Any], structure: TreeSpec | None, conditions: Conditions, depth: int
    ) -> None:
        self.depth = depth
        self.conditions = conditions
        self._runner = runner
        self._leaves = leaves
        self._structure = structure
        self._state = runner.state()
        self._stream = runner.streams.compute()
        self._saves: list[RecomputedTensor] | None = []
        self._objection: str | None = None
        self._settled_saves: tuple[weakref.ref[RecomputedTensor], ...] = ()
        self._layouts: tuple[Layout, ...] = ()
        self._promises: tuple[weakref.ref[RecomputedTensor], ...] = ()
        self.outputs: Sequence[Output] = ()
        self._outputs_count = 0
        self._watched: dict[int, torch.Tensor] = {}
        self.ran_backward = False
        """Whether what the forward has saved was used before it ended."""

    @property
    def state(self) -> State:
        """What the forward was to read, before it ran."""
        return self._state

    @property
    def is_open(self) -> bool:
        """Whether the forward runs: nobody has called :meth:`settle` or :meth:`keep`."""
        return self._saves is not None

    @property
    def is_cheap(self) -> bool:
        """Whether making it again to use its output as an argument costs little time and memory."""
        return self._runner.is_cheap

    def pack(self, tensor: torch.Tensor) -> RecomputedTensor | KeptTensor:
        """The unit saves ``tensor``. It is kept until :meth:`settle`."""
        kept = KeptTensor(tensor)
        if is_parameter(tensor):
            return kept
        if not is_plain(tensor):
            self._objection = objection_to([tensor], "it saves")
            return kept
        recomputed = RecomputedTensor(self, Layout.of(tensor), None, kept)
        assert self._saves is not None
        self._saves.append(recomputed)
        return recomputed

    def objection(self) -> str | None:
        """Why what the forward has saved cannot be made again, before :meth:`settle`; None: nothing speaks against."""
        if self._objection is None and any(r.held is not None and r.held.is_changed for r in self._saves or ()):
            return "its forward changes in place what it has saved"  # then backward raises, as it would without us
        return self._objection

    def saved(self) -> list[torch.Tensor]:
        """What the unit has saved, before :meth:`settle`."""
        return [recomputed.held.tensor() for recomputed in self._saves or () if recomputed.held is not None]

    def settle(self, made: Sequence[torch.Tensor], outputs: Sequence[Output], outside: frozenset[int]) -> None:
        """The forward is over: from now on what it saved, and its output, are made again.

        Args:
            made: the tensors of the output.
            outputs: the storages among them that are the call's own.
            outside: numbers of the saves that are tensors from elsewhere; they stay.
        """
        self.outputs = outputs
        self._outputs_count = len(made)
        by_identity = {output.identity: output for output in outputs}
        assert self._saves is not None
        for number, recomputed in enumerate(self._saves):
            assert recomputed.held is not None
            if number in outside:
                continue
            recomputed.output = by_identity.get(storage_identity(recomputed.held.tensor()))
            recomputed.held = None
        self._layouts = tuple([recomputed.layout for recomputed in self._saves])
        self._settled_saves = tuple([weakref.ref(recomputed) for recomputed in self._saves])
        self._saves = None

    def keep(self) -> None:
        """Whatever was saved stays, as without recomputation."""
        self._saves = None

    @property
    def unit(self) -> str:
        """The name of the unit."""
        return self._runner.name

    def watch(self, leaves: Sequence[Any]) -> None:
        """From now on an argument that is overwritten without a new version is an error. ``leaves``: flat arguments."""
        plain = {number: leaf for number, leaf in enumerate(leaves) if type(leaf) is torch.Tensor}
        self._watched = {number: checksum(leaf) for number, leaf in plain.items()}

    def promise(self, output: Output, tensor: torch.Tensor) -> RecomputedTensor:
        """``tensor``, a view of ``output``, is saved outside the unit."""
        promise = RecomputedTensor(self, Layout.of(tensor), output, None)
        self._promises = (*self._promises, weakref.ref(promise))
        return promise

    def run_again(self) -> None:
        """Runs the unit's forward and fills what is alive and empty.

        Raises:
            RuntimeError: a parameter or buffer of the unit was changed in place since.
            OffloadStateError: something else that the forward reads has changed, or it did not do the same again.
        """
        runner, streams = self._runner, self._runner.streams
        current = streams.compute()
        with runner.lock, streams.on(self._stream):
            if current != self._stream:
                streams.wait(self._stream, streams.fence(current))
            if runner.state() != self._state:
                raise _changed(runner, self._state)
            leaves = [leaf.tensor() if isinstance(leaf, Argument) else leaf for leaf in self._leaves]
            if not all(torch.equal(checksum(leaves[number]), known) for number, known in self._watched.items()):
                raise OffloadStateError(
                    f"{shown(runner.name)} cannot be recomputed in backward: an argument of it has been overwritten "
                    "since its forward, by something that does not increase the version counter (a collective in "
                    "place, a kernel that writes over its input, .data); give it a copy, or take it out of "
                    "fine_grained_offload.recompute"
                )
            began = runner.begin()
            args, kwargs = unflatten(leaves, self._structure)
            made, saved = runner.forward(args, kwargs, self.conditions)
            self._check(made, saved)
            runner.made_again(self._fill(made, saved, leaves), began)

    def ready(self) -> Any:
        """What was made may be read on the current stream; which is returned if it is not the call's own."""
        streams = self._runner.streams
        compute = streams.compute()
        if compute == self._stream:
            return None
        streams.wait(compute, streams.fence(self._stream))
        return compute

    def after(self, foreign: Sequence[Any]) -> None:
        """What is queued from now on on the call's stream comes after what is queued on others."""
        streams = self._runner.streams
        for stream in foreign:
            streams.wait(self._stream, streams.fence(stream))

    def _check(self, made: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> None:
        expected = [layout[:3] for layout in self._layouts]
        same = len(made) == self._outputs_count and list(map(signature, saved)) == expected
        same = same and all(Layout.of(made[output.number]) == output.layout for output in self.outputs)
        if not same:
            raise OffloadStateError(
                f"{shown(self._runner.name)} did not do the same when it was recomputed in backward: it saved "
                f"{len(saved)} tensors instead of {len(self._layouts)}, or of other shapes; its forward depends on "
                "more than its arguments: take it out of fine_grained_offload.recompute"
            )

    def _fill(
        self, made: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], leaves: Sequence[Any]
    ) -> list[torch.Tensor]:
        filled = []
        for reference, tensor in zip(self._settled_saves, saved, strict=True):
            recomputed = reference()
            if recomputed is not None and recomputed.held is None:
                recomputed.held = KeptTensor(tensor)
                filled.append(tensor)
        for reference in self._promises:
            promise = reference()
            if promise is not None and promise.held is None:
                assert promise.output is not None
                tensor = promise.layout.over(made[promise.output.number])
                promise.held = KeptTensor(tensor)
                filled.append(tensor)
        self._promises = tuple([reference for reference in self._promises if reference() is not None])
        given = {storage_identity(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return [tensor for tensor in filled if storage_identity(tensor) not in given]


def _changed(runner: Runner, before: State) -> RuntimeError:
    """Why a forward cannot run again: autograd's own error for what autograd itself refuses, else ours."""
    name, difference = shown(runner.name), runner.difference(before)
    if difference == CHANGED:
        return RuntimeError(
            f"{name} cannot be recomputed in backward: one of its parameters or buffers has been modified by an "
            "inplace operation since its forward; run backward before, or take it out of fine_grained_offload.recompute"
        )
    if difference == REPLACED:
        return OffloadStateError(
            f"{name} cannot be recomputed in backward: one of its parameters or buffers is another tensor now than in "
            "its forward (torch.func.functional_call, load_state_dict(assign=True), or an assignment in between); run "
            "backward before, or take it out of fine_grained_offload.recompute"
        )
    return OffloadStateError(
        f"{name} cannot be recomputed in backward: {difference} has changed since its forward, and the gradients would "
        "be those of another function; run backward before the change, or take it out of "
        "fine_grained_offload.recompute"
    )
