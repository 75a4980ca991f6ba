"""DeepSpeed's engine under ZeRO 0-3. Attach after ``deepspeed.initialize``: names and modules are final only then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import deepspeed.comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from ds_fgoffload.compat.private import (
    MODEL_STEP,
    forward_modules,
    graph_task_id,
    iter_params,
    z3_leaf_module,
)
from ds_fgoffload.config import SECTION, find_section
from ds_fgoffload.errors import OffloadConfigError


class ZeroAdapter:
    """The engine calls its module once per micro-batch, whatever its counters say of accumulation."""

    ranks_hold_same_modules = True

    def __init__(self, engine: DeepSpeedEngine) -> None:
        if engine.is_deepcompile_enabled():
            msg = (
                f"{SECTION}: compile.deepcompile is on, and a graph compiled by DeepCompile calls no module hooks; use "
                'its own pass ("compile": {"deepcompile": true, "offload_activation": true}), or turn deepcompile off'
            )
            raise OffloadConfigError(msg)
        self._engine = engine
        self.root: nn.Module = engine.module
        self.kind = f"{type(engine).__name__}, ZeRO {engine.zero_optimization_stage()}"

    def section(self) -> Mapping[str, Any] | None:
        return find_section(self._engine.config)

    def gather(self, item: Any) -> list[Any]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [item]
        items: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(items, item)
        return items

    def release_engine_buffers(self) -> None:
        pass

    @property
    def whole(self) -> Callable[[nn.Module], AbstractContextManager[Any]]:
        return partial(_whole, weakref.ref(self._engine))

    def on_destroy(self, detach: Callable[[], None]) -> None:
        engine = self._engine
        destroy = type(engine).destroy

        def detach_and_destroy() -> None:
            detach()
            destroy(engine)

        engine.destroy = detach_and_destroy

    def after_step(self, stepped: Callable[[], None]) -> None:
        engine = self._engine
        take_step = getattr(type(engine), MODEL_STEP)

        def take_step_and_tell(*arguments: Any, **keywords: Any) -> None:
            take_step(engine, *arguments, **keywords)
            stepped()

        setattr(engine, MODEL_STEP, take_step_and_tell)

    def monitor(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        monitor = getattr(self._engine, "monitor", None)
        if monitor is not None and monitor.enabled and self._engine.global_rank == 0:
            samples = self._engine.global_samples
            monitor.write_events([(f"Train/{SECTION}/{name}", number, samples) for name, number in numbers().items()])

    def release(self) -> None:
        self._engine.__dict__.pop("destroy", None)
        self._engine.__dict__.pop(MODEL_STEP, None)


def _whole(held: weakref.ref[DeepSpeedEngine], module: nn.Module) -> AbstractContextManager[Any]:
    engine = held()
    optimizer = None if engine is None else engine.optimizer
    partitioning = getattr(optimizer, "parameter_offload", optimizer)  # ZeRO-3 without an optimizer: it itself
    if not hasattr(partitioning, "pre_sub_module_forward_function"):
        return nullcontext()
    return _gathered(module, partitioning)


_RUNNING_AGAIN = -1
"""Stands for a module's number among those that use a parameter."""


@contextmanager
def _gathered(module: nn.Module, partitioning: Any) -> Iterator[None]:
    """Does for ``module`` what DeepSpeed's hooks do around its call, as they do for the modules below it.

    At the end of a module's forward they free its parameters, whoever else is using them: here ``module``, or one
    below, may be in the middle of its own backward. So what is there is marked as in use.
    """
    own = list(iter_params(module, recurse=z3_leaf_module(module)))
    if own:  # a module inside a "leaf module" is none of DeepSpeed's: the leaf stands for all below it
        module = getattr(own[0], "ds_z3_leaf_module", module)
    parameters: list[Any] = list(module.parameters())
    there = [p for p in parameters if getattr(p, "ds_status", None) is ZeroParamStatus.AVAILABLE]
    for parameter in there:
        parameter.ds_active_sub_modules.add(_RUNNING_AGAIN)
    # In forward they are there. In backward they may be in one step and not in the next, also those that persist
    # (before the first step's end they do not yet). DeepSpeed records the order of the modules that fetch, and one that
    # differs makes it give up its trace and let go of every parameter, to gather it again in autocast's dtype.
    in_backward = graph_task_id() != -1
    is_fetched = bool(own) if in_backward else any(p.ds_status is not ZeroParamStatus.AVAILABLE for p in own)
    try:
        if is_fetched:
            partitioning.pre_sub_module_forward_function(module)
        try:
            yield
        finally:
            if is_fetched:
                forward_modules.pop()
                partitioning.post_sub_module_forward_function(module)
    finally:
        for parameter in there:
            parameter.ds_active_sub_modules.discard(_RUNNING_AGAIN)
