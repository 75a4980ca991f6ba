"""A device in virtual time: streams have a clock each, copies take as long as their bytes do, memory is counted.

Copies are made at once, so numbers are right; what is simulated is when. The host has a clock of its own and runs ahead
of the device, until it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_fgoffload.device.streams import Fence
from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings
from ds_fgoffload.planning.planner import PlanGoal
from ds_fgoffload.runtime.hooks import ModuleHooks
from ds_fgoffload.runtime.offloader import Offloader
from ds_fgoffload.saved.eligibility import Eligibility
from ds_fgoffload.saved.transfer import Transfer
from ds_fgoffload.schedule.plan import Plan

HOST_MS_PER_CALL = 0.01


class Event(float):
    """When it is reached, in ms."""

    def synchronize(self) -> None:
        """For the host pool, which waits for the last uses of what it gives back: the copies are made at once."""


class SimulatedStreams:
    """``link_bytes_per_ms`` in either direction."""

    synchronous = False
    d2h = "d2h"
    h2d = "h2d"
    device = torch.device("cpu")

    def __init__(self, link_bytes_per_ms: float, total_bytes: int = 1 << 40) -> None:
        self.link_bytes_per_ms = link_bytes_per_ms
        self.clocks_ms = {"compute": 0.0, "d2h": 0.0, "h2d": 0.0}
        self.host_ms = 0.0
        self.read_ms = 0.0
        """From when the device has come to a read until the host has gone on."""
        self.waited_ms = 0.0
        self.peak_bytes = 0
        self.emptied = 0
        self._total_bytes = total_bytes
        self.fences = 0
        self._seen: Callable[[], None] | None = None
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def work(self, ms: float, made: torch.Tensor | None = None) -> None:
        """A kernel of that length, which makes a tensor."""
        self.host_ms += HOST_MS_PER_CALL
        self.clocks_ms["compute"] = max(self.clocks_ms["compute"], self.host_ms) + ms
        if made is not None:
            self._made(made)

    def read(self) -> None:
        """The host waits for compute, and for the copies out that are queued."""
        self.clocks_ms["compute"] = max(self.clocks_ms["compute"], self.clocks_ms["d2h"]) + self.read_ms
        self.host_ms = max(self.host_ms, self.clocks_ms["compute"])
        if self._seen is not None:
            self._seen()

    def compute(self) -> str:
        return "compute"

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        yield

    def fence(self, stream: str) -> Fence:
        self.fences += 1
        return Fence(stream, self.fences, Event(self.clocks_ms[stream]))

    def wait(self, stream: str, fence: Fence | None) -> None:
        assert fence is not None
        waited_ms = max(0.0, fence.event - self.clocks_ms[stream])
        self.clocks_ms[stream] += waited_ms
        if stream == "compute":
            self.waited_ms += waited_ms

    def synchronize(self, fence: Fence | None) -> None:
        assert fence is not None
        self.host_ms = max(self.host_ms, fence.event)

    def reached(self, fence: Fence) -> bool:
        return bool(fence.event <= self.host_ms)

    def elapsed_ms(self, begin: Fence, end: Fence) -> float:
        return float(end.event - begin.event)

    def copy(self, stream: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)
        self.clocks_ms[stream] += source.numel() / self.link_bytes_per_ms

    def allocate(self, stream: str, size_bytes: int) -> torch.Tensor:
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        self._made(memory)
        return memory

    def watch_reads(self, seen: Callable[[], None] | None) -> None:
        self._seen = seen

    def allocated_bytes(self) -> int:
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size_bytes for _, size_bytes in self._storages.values())

    def peak_allocated_bytes(self) -> int:
        return self.peak_bytes

    def total_bytes(self) -> int:
        return self._total_bytes

    def empty_cache(self) -> None:
        self.emptied += 1

    def _made(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._storages[reference.cdata] = (reference, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes())


class Layer(nn.Module):
    """Saves its input; takes ``ms`` in forward and twice that in backward."""

    def __init__(self, streams: SimulatedStreams, ms: float, *, reads: bool = False) -> None:
        super().__init__()
        self.streams, self.ms, self.reads = streams, ms, reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads:
            self.streams.work(self.ms / 2)
            self.streams.read()
        y = _Square.apply(x, self.streams, self.ms / 2 if self.reads else self.ms)
        assert isinstance(y, torch.Tensor)
        return y


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, streams: SimulatedStreams, ms: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.streams, ctx.ms = streams, ms
        y = x * x
        streams.work(ms, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.streams.work(2 * ctx.ms)
        return 2 * x * gradient, None, None


@dataclass
class Steady:
    """One step in steady state."""

    peak_bytes: int
    waited_ms: float
    took_ms: float
    offloaded_bytes: int
    late_reloads: int
    gradient: torch.Tensor


class Training:
    """A stack of layers that keep the same number of bytes, all of them units, and an offloader on it."""

    def __init__(
        self,
        *,
        layers: int = 8,
        layer_ms: float = 1.0,
        layer_bytes: int = 4000,
        link_bytes_per_ms: float = 5000.0,
        goal: PlanGoal | None = None,
        plan: Plan | None = None,
        reads: bool = False,
        total_bytes: int = 1 << 40,
        stages: int = 1,
        micro_batches: int = 1,
    ) -> None:
        self.streams = SimulatedStreams(link_bytes_per_ms, total_bytes)
        self.stages, self.micro_batches = stages, micro_batches
        self.layer_bytes = layer_bytes
        self.model = nn.Sequential(*(Layer(self.streams, layer_ms, reads=reads) for _ in range(layers)))
        units = {name: module for name, module in self.model.named_modules() if name}
        self.pool = HostPool(HostPoolSettings(1 << 30, pin_memory=False), slab_bytes=1 << 12)
        self.offloader = Offloader(
            units,
            {},
            Eligibility(self.model, 0, self.streams.device),
            Plan() if plan is None else plan,
            Transfer(self.streams),
            self.pool,
            raise_when_full=False,
            goal=goal,
        )
        self.hooks = ModuleHooks(self.model, units, self.offloader)

    def step(self) -> torch.Tensor:
        """A step of the first of ``stages`` pipeline stages, or one micro-batch; the sum of the inputs' gradients."""
        inputs: list[torch.Tensor] = []
        losses: list[torch.Tensor] = []
        for number in range(self.micro_batches + self.stages - 1):
            if number < self.micro_batches:
                x = torch.linspace(0.9, 1.1, self.layer_bytes // 4).requires_grad_()
                self.streams.work(0.1, x)
                inputs.append(x)
                losses.append(self.model(x).sum())
            if number >= self.stages - 1:
                losses.pop(0).backward()
        self.streams.read()
        return sum((x.grad for x in inputs if x.grad is not None), torch.zeros(self.layer_bytes // 4))

    def steady(self, rounds: int = 12) -> Steady:
        """Trains until plans are made, then one step more, and tells of that."""
        for _ in range(rounds):
            self.step()
        self.streams.peak_bytes = 0
        before, waited_ms, began_ms = self.offloader.stats(), self.streams.waited_ms, self.streams.clocks_ms["compute"]
        gradient = self.step()
        after = self.offloader.stats()
        return Steady(
            peak_bytes=self.streams.peak_bytes,
            waited_ms=self.streams.waited_ms - waited_ms,
            took_ms=self.streams.clocks_ms["compute"] - began_ms,
            offloaded_bytes=after.offloaded_bytes - before.offloaded_bytes,
            late_reloads=after.late_reloads - before.late_reloads,
            gradient=gradient,
        )
