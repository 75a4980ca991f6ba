"""What a forward ran under besides its arguments, so that it can run under the same again: for recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from ds_fgoffload.device.streams import random_states, set_random_states


class _Autocast(NamedTuple):
    device_type: str
    enabled: bool
    dtype: torch.dtype


_autocast = cache(_Autocast)  # there are few, and one of these conditions for every call that is made again


class Conditions:
    """The training flags of ``modules``, autocast, and the state of the random generators, at the time of construction.

    Args:
        modules: a module and all below it.
        device: the one that is trained on.
    """

    __slots__ = ("_autocasts", "_cache_enabled", "_device", "_random", "training")

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self.training = training_flags(modules)
        self._autocasts = tuple(
            [
                _autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in dict.fromkeys((device.type, "cpu"))
            ]
        )
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._random: tuple[torch.Tensor, ...] | None = random_states(device)

    def forget_unused_random(self) -> None:
        """The forward is over: the generators' states are kept only if it drew from them."""
        assert self._random is not None
        if all(map(torch.equal, self._random, random_states(self._device))):
            self._random = None

    @contextmanager
    def restored(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """All is as it was, with gradients enabled; afterwards as it is now. ``modules`` are those of the beginning."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self._autocasts:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache_enabled)
                )
            now = training_flags(modules)
            if now != self.training:
                stack.callback(_set_training_flags, modules, now)
                _set_training_flags(modules, self.training)
            if self._random is not None:
                stack.callback(set_random_states, self._device, random_states(self._device))
                set_random_states(self._device, self._random)
            yield


def training_flags(modules: Sequence[nn.Module]) -> tuple[bool, ...]:
    """``training`` of each module."""
    return tuple([module.training for module in modules])


def _set_training_flags(modules: Sequence[nn.Module], flags: tuple[bool, ...]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
