"""What the runtime must know of whatever it is attached to: an adapter per kind of engine, which copies nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_fgoffload.engines.pipeline import PipelineAdapter
from ds_fgoffload.engines.plain import PlainAdapter
from ds_fgoffload.engines.zero import ZeroAdapter

__all__ = ["Adapter", "adapt", "engine_of"]


class Adapter(Protocol):
    """An engine or a module, as the runtime sees it."""

    root: nn.Module
    """Its forward is the forward of one micro-batch; unit names are names in its ``named_modules()``."""
    ranks_hold_same_modules: bool

    kind: str
    """What trains the module, in words."""

    def section(self) -> Mapping[str, Any] | None:
        """The ``fine_grained_offload`` section that came with it."""

    def gather(self, item: Any) -> list[Any]:
        """``item`` of every rank, by rank. Collective where there are several ranks."""

    def release_engine_buffers(self) -> None:
        """The engine is to let go of activations that it keeps beyond their use."""

    @property
    def whole(self) -> Callable[[nn.Module], AbstractContextManager[Any]]:
        """In ``whole(module)`` its forward may run, in backward too: its parameters are there, and none goes that was.

        Graphs hold this function, so it holds neither engine nor module.
        """

    def on_destroy(self, detach: Callable[[], None]) -> None:
        """``detach`` is to be called when the engine is destroyed."""

    def after_step(self, stepped: Callable[[], None]) -> None:
        """``stepped`` is to be called on every rank when an optimizer step was taken, if such steps are seen here."""

    def monitor(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        """``numbers()`` is to be written to DeepSpeed's monitors (TensorBoard, wandb, csv), if there are any."""

    def release(self) -> None:
        """Undoes all of the above."""


def adapt(target: object) -> Adapter:
    """The adapter for ``target``.

    Raises:
        TypeError: it is neither a DeepSpeed engine nor a module.
    """
    if isinstance(target, PipelineEngine):
        return PipelineAdapter(target)
    if isinstance(target, DeepSpeedEngine):
        return ZeroAdapter(target)
    if isinstance(target, nn.Module):
        return PlainAdapter(target)
    msg = f"cannot attach to a {type(target).__name__}: a DeepSpeed engine or a torch.nn.Module is needed"
    raise TypeError(msg)


def engine_of(module: nn.Module, optimizer: object = None) -> DeepSpeedEngine | None:
    """The engine that was made of ``module``, for callbacks, which are given that and the ``optimizer`` only.

    Several engines may have been made of it, one after the other, and one that nobody uses may still be there.
    """
    # not isinstance, which asks each object for its class: some load a package when they are asked for anything
    engines = [one for one in gc.get_objects() if issubclass(type(one), DeepSpeedEngine) and one.module is module]
    optimizers = (optimizer, getattr(optimizer, "optimizer", None))  # Accelerate wraps it
    return next((one for one in engines if one.optimizer in optimizers), engines[-1] if engines else None)
