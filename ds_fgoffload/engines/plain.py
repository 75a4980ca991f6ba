"""A plain ``nn.Module``, trained by its user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class PlainAdapter:
    """Every call of the module with gradients enabled is a micro-batch. Knows of no other rank."""

    ranks_hold_same_modules = True
    kind = "no engine"

    def __init__(self, module: nn.Module) -> None:
        self.root = module

    def section(self) -> None:
        return None

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def release_engine_buffers(self) -> None:
        pass

    @property
    def whole(self) -> Callable[[nn.Module], AbstractContextManager[Any]]:
        return nullcontext

    def on_destroy(self, detach: Callable[[], None]) -> None:
        pass

    def after_step(self, stepped: Callable[[], None]) -> None:
        pass  # the steps of a loop of the user's own are not seen

    def monitor(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        pass

    def release(self) -> None:
        pass
