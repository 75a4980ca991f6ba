"""Ways to train the same model with less memory, ours and everyone else's, each opened, stepped and closed again.

Who can choose offloads what the same modules save. A mode leaves the model as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ds_fgoffload
from benchmarks.measure import ON_GPU, trl_activation_offloading
from ds_fgoffload.selection.patterns import select


@dataclass(frozen=True)
class Job:
    """What every mode trains: ``loss = model(tokens)``, backward into gradients that stay allocated, no optimizer."""

    kind: str
    """Which of the stacks it is."""
    model: nn.Module
    tokens: torch.Tensor
    selected: Sequence[str]
    """Patterns of the modules that are offloaded."""
    tiny: bool = False

    def section(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """The whole section of a mode of ours; in a tiny model every saved tensor is smaller than the default size."""
        smallest = {"min_tensor_bytes": 0} if self.tiny else {}
        return {"modules": list(self.selected), **smallest, **section}

    def step(self) -> torch.Tensor:
        """Forward and backward; the loss, detached."""
        self.model.zero_grad(set_to_none=False)
        loss = self.model(self.tokens)
        loss.backward()
        detached: torch.Tensor = loss.detach()
        return detached

    def units(self) -> list[nn.Module]:
        """The selected modules."""
        return list(select(self.model, self.selected).units.values())


@dataclass
class Run:
    """A mode while it is open."""

    step: Callable[[], torch.Tensor]
    attachment: ds_fgoffload.Attachment | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What the mode itself can say of a step; filled while it runs."""


Open: TypeAlias = Callable[[Job], AbstractContextManager[Run]]


@dataclass(frozen=True)
class Mode:
    """One row of the comparison."""

    name: str
    label: str
    open: Open
    warmup: int = 2
    needs_gpu: bool = False
    section: Mapping[str, Any] | None = None


@contextlib.contextmanager
def plain(job: Job) -> Iterator[Run]:
    yield Run(job.step)


@contextlib.contextmanager
def ours(job: Job, *, section: Mapping[str, Any]) -> Iterator[Run]:
    attachment = ds_fgoffload.attach(job.model, job.section(section))
    try:
        yield Run(job.step, attachment)
    finally:
        attachment.detach()


@contextlib.contextmanager
def recompute(job: Job) -> Iterator[Run]:
    """Every layer in a checkpoint of its own."""
    with replaced_forwards({layer: _checkpointed(layer.forward) for layer in job.model.layers}):
        yield Run(job.step)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # nothing here draws random numbers
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


@contextlib.contextmanager
def on_cpu(job: Job, *, whole: bool) -> Iterator[Run]:
    """``torch.autograd.graph.save_on_cpu``, which copies the weights that a module saves, too."""

    def context() -> AbstractContextManager[Any]:
        return save_on_cpu(pin_memory=ON_GPU)

    with around([job.model] if whole else job.units(), context):
        yield Run(job.step)


@contextlib.contextmanager
def trl(job: Job, *, whole: bool) -> Iterator[Run]:
    """TRL's manager around the step; unless ``whole``, its own ``NoOpManager`` keeps it out of all other modules."""
    package = trl_activation_offloading()
    manager = package.OffloadActivations()
    manager.update_model_params(job.model)

    def hooks() -> AbstractContextManager[Any]:
        return saved_tensors_hooks(manager.pack_hook, manager.unpack_hook)

    def step() -> torch.Tensor:
        with manager, contextlib.nullcontext() if whole else package.NoOpManager():
            return job.step()

    with around([] if whole else job.units(), hooks):
        yield Run(step)


@contextlib.contextmanager
def deepspeed_checkpoint_inputs(job: Job) -> Iterator[Run]:
    """Full recompute, with DeepSpeed's own manager taking the inputs of the layers to the host."""
    manager = CheckpointHiddenStatesOffload()

    def marked(forward: Callable[..., Any], x: torch.Tensor, *rest: Any) -> Any:
        manager.mark(x)
        try:
            return forward(x, *rest)
        finally:
            manager._consume_mark(x)

    def step() -> torch.Tensor:
        with manager:
            return job.step()

    with replaced_forwards({layer: partial(marked, _checkpointed(layer.forward)) for layer in job.model.layers}):
        yield Run(step)


@contextlib.contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules with another ``forward`` meanwhile."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward  # the class's own is there again


@contextlib.contextmanager
def around(modules: Sequence[nn.Module], make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Each call of one of ``modules`` runs inside a context of its own; modules do not lie inside each other."""
    opened: list[AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        opened.append(make())
        opened[-1].__enter__()

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    handles = [module.register_forward_pre_hook(enter) for module in modules]
    handles += [module.register_forward_hook(leave, always_call=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
