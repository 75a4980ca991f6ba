"""DeepSpeed's engine under ZeRO 0-3. Attach after ``deepspeed.initialize``: names and modules are final only then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import deepspeed.comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_fgoffload.config import SECTION, find_section
from ds_fgoffload.errors import OffloadConfigError


class ZeroAdapter:
    """The engine calls its module once per micro-batch, whatever its counters say of accumulation."""

    ranks_hold_same_modules = True

    def __init__(self, engine: DeepSpeedEngine) -> None:
        if getattr(engine._config.compile_config, "deepcompile", False):
            msg = (
                f"{SECTION}: compile.deepcompile is on, and a graph compiled by DeepCompile calls no module hooks; use "
                'its own pass ("compile": {"deepcompile": true, "offload_activation": true}), or turn deepcompile off'
            )
            raise OffloadConfigError(msg)
        self._engine = engine
        self.root: nn.Module = engine.module

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

    def on_destroy(self, detach: Callable[[], None]) -> None:
        engine = self._engine
        destroy = type(engine).destroy

        def detach_and_destroy() -> None:
            detach()
            destroy(engine)

        engine.destroy = detach_and_destroy

    def after_step(self, stepped: Callable[[], None]) -> None:
        engine = self._engine
        take_step = type(engine)._take_model_step

        def take_step_and_tell(*arguments: Any, **keywords: Any) -> None:
            take_step(engine, *arguments, **keywords)
            stepped()

        engine._take_model_step = take_step_and_tell

    def monitor(self, numbers: Mapping[str, float]) -> None:
        monitor = getattr(self._engine, "monitor", None)
        if monitor is not None and monitor.enabled and self._engine.global_rank == 0:
            samples = self._engine.global_samples
            monitor.write_events([(f"Train/{SECTION}/{name}", number, samples) for name, number in numbers.items()])

    def release(self) -> None:
        self._engine.__dict__.pop("destroy", None)
        self._engine.__dict__.pop("_take_model_step", None)
