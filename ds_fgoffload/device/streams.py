"""Order on the device: streams, fences, copies and memory of one device, behind one interface.

Nothing else in the package talks to the accelerator. Every wait here is a wait of one stream for another: the host is
never blocked by it. On a device whose work is synchronous (CPU) streams and fences are ``None`` and the copies are done
when :meth:`Streams.copy` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from deepspeed.accelerator import get_accelerator

from ds_fgoffload.compat.private import CudaEventBase, current_raw_stream
from ds_fgoffload.device.cuda_reads import cuda_reads


class Fence(NamedTuple):
    """A point on a stream; whoever waits for it comes after everything that was queued there before."""

    stream: Any
    number: int
    event: Any


def latest(fences: tuple[Fence, ...]) -> tuple[Fence, ...]:
    """One fence per stream, the last: on one stream a later fence implies the earlier ones."""
    if len(fences) < 2:
        return fences
    last: dict[Any, Fence] = {}
    for fence in fences:
        known = last.get(fence.stream)
        if known is None or known.number < fence.number:
            last[fence.stream] = fence
    return tuple(last.values())


class Streams(Protocol):
    """What the package needs of a device."""

    device: torch.device
    synchronous: bool
    """True if every operation has ended when its call returns; then nothing is gained by releasing memory late."""
    d2h: Any
    h2d: Any

    def compute(self) -> Any:
        """The stream on which the caller's kernels are queued now."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Kernels are queued on ``stream`` meanwhile."""

    def fence(self, stream: Any) -> Fence | None:
        """Marks the present end of ``stream``."""

    def wait(self, stream: Any, fence: Fence | None) -> None:
        """Work queued on ``stream`` from now on comes after ``fence``."""

    def synchronize(self, fence: Fence | None) -> None:
        """Blocks the host until ``fence`` is reached. Not to be used inside a step that is to be quick."""

    def reached(self, fence: Fence) -> bool:
        """Whether the device has passed ``fence``, as far as the host can tell without waiting."""

    def elapsed_ms(self, begin: Fence, end: Fence) -> float:
        """Time on the device from ``begin`` to ``end``, which may be the earlier; both have been reached."""

    def watch_reads(self, seen: Callable[[], None] | None) -> None:
        """From now on ``seen`` is called after each blocking read of the device by the host. None: no longer."""

    def allocated_bytes(self) -> int:
        """Device memory in use by tensors of this process, in the order of the calls."""

    def peak_allocated_bytes(self) -> int:
        """The highest that it has been."""

    def total_bytes(self) -> int:
        """Memory of the device."""

    def empty_cache(self) -> None:
        """Gives back what the allocator keeps for reuse. Blocks the host until the device is idle."""

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy of equally long one-dimensional uint8 tensors on ``stream``."""

    def allocate(self, stream: Any, size_bytes: int) -> torch.Tensor:
        """Device memory (uint8, one-dimensional) out of the allocator's pool for ``stream``."""


class SynchronousStreams:
    """CPU, and any device that has no streams: real copies, done at once."""

    synchronous = True
    d2h = None
    h2d = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def compute(self) -> None:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def fence(self, stream: Any) -> None:
        return None

    def wait(self, stream: Any, fence: Fence | None) -> None:
        pass

    def synchronize(self, fence: Fence | None) -> None:
        pass

    def reached(self, fence: Fence) -> bool:
        return True

    def elapsed_ms(self, begin: Fence, end: Fence) -> float:
        return 0.0

    def watch_reads(self, seen: Callable[[], None] | None) -> None:
        pass

    def allocated_bytes(self) -> int:
        return 0

    def peak_allocated_bytes(self) -> int:
        return 0

    def total_bytes(self) -> int:
        return 0

    def empty_cache(self) -> None:
        pass

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def allocate(self, stream: Any, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)


class AcceleratorStreams:
    """A device with streams, through DeepSpeed's accelerator interface (CUDA, ROCm, XPU, NPU alike)."""

    synchronous = False

    def __init__(self, device: torch.device) -> None:
        accelerator = get_accelerator()
        self.device = device
        self._current_stream = accelerator.current_stream
        self._on = accelerator.stream
        is_cuda = device.type == "cuda"
        # The class under torch.cuda.Event, which adds nothing but time, and work for Python's collector.
        self._event = (CudaEventBase if is_cuda else None) or accelerator.Event
        with accelerator.device(device.index):
            self.d2h = accelerator.Stream()
            self.h2d = accelerator.Stream()
        # Asked for at every saved tensor. torch makes a new object of it each time, at several times the cost.
        self._current_handle = current_raw_stream if is_cuda else None
        self._by_handle: dict[int, Any] = {}
        self._count = 0
        self._count_lock = threading.RLock()  # the collector may come in between, and what it ends puts fences too

    def compute(self) -> Any:
        if self._current_handle is None:
            return self._current_stream(self.device.index)
        handle = self._current_handle(self.device.index)
        stream = self._by_handle.get(handle)
        if stream is None:
            stream = self._by_handle[handle] = self._current_stream(self.device.index)
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        current = self.compute()
        if stream == current:
            return nullcontext()
        if self._current_handle is not None and torch.cuda.current_device() == self.device.index:
            return _OnCudaStream(stream, current)
        context: AbstractContextManager[Any] = self._on(stream)
        return context

    def fence(self, stream: Any) -> Fence:
        event = self._event(enable_timing=True)
        with self._count_lock:  # numbers are in the order of the stream also where two threads put fences there
            event.record(stream)
            self._count += 1
            return Fence(stream, self._count, event)

    def wait(self, stream: Any, fence: Fence | None) -> None:
        if fence is not None and fence.stream != stream:
            fence.event.wait(stream)

    def synchronize(self, fence: Fence | None) -> None:
        if fence is not None:
            fence.event.synchronize()

    def reached(self, fence: Fence) -> bool:
        return bool(fence.event.query())

    def elapsed_ms(self, begin: Fence, end: Fence) -> float:
        return float(begin.event.elapsed_time(end.event))

    def watch_reads(self, seen: Callable[[], None] | None) -> None:
        if self.device.type == "cuda":
            cuda_reads.watch(self, seen)

    def allocated_bytes(self) -> int:
        if self.device.type == "cuda":  # the same, without a flat dictionary of all that the allocator counts
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0
        return int(get_accelerator().memory_allocated(self.device.index))

    def peak_allocated_bytes(self) -> int:
        return int(get_accelerator().max_memory_allocated(self.device.index))

    def total_bytes(self) -> int:
        return int(get_accelerator().total_memory(self.device.index))

    def empty_cache(self) -> None:
        get_accelerator().empty_cache()

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self.on(stream):
            destination.copy_(source, non_blocking=True)

    def allocate(self, stream: Any, size_bytes: int) -> torch.Tensor:
        with self.on(stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)


class _OnCudaStream:
    """What ``torch.cuda.stream`` does where both streams are the current device's, for less of the host's time."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any, before: Any) -> None:
        self._stream = stream
        self._before = before

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


def accelerator_device() -> torch.device:
    """The device that this process computes on."""
    accelerator = get_accelerator()
    name = accelerator.device_name()
    return torch.device("cpu") if name == "cpu" else torch.device(name, accelerator.current_device())


def product_name(device: torch.device) -> str:
    """What the maker calls it, such as ``NVIDIA H200``; of a device that does not say, its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free_device_bytes() -> int:
    """Memory that is free on it, to this process and others."""
    return int(get_accelerator().available_memory(accelerator_device().index))


def total_device_bytes() -> int:
    """Memory of the device that this process computes on."""
    return int(get_accelerator().total_memory(accelerator_device().index))


def accelerator_is_cpu() -> bool:
    """Whether there is no device but the CPU; asks no device, so that a forked child may ask."""
    return bool(get_accelerator().device_name() == "cpu")


def on_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """``device`` is this thread's current one meanwhile: a new thread begins with the first, whatever its rank."""
    if device is None or device.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = get_accelerator().device(device.index)
    return context


def make_streams(device: torch.device) -> Streams:
    """The streams of ``device``."""
    return SynchronousStreams(device) if get_accelerator().is_synchronized_device() else AcceleratorStreams(device)


def random_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """The states of the random generators of the CPU and of ``device``."""
    if device.type == "cpu":
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), get_accelerator().get_rng_state(device.index)


def set_random_states(device: torch.device, states: tuple[torch.Tensor, ...]) -> None:
    """Undoes what was drawn since :func:`random_states`."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        get_accelerator().set_rng_state(states[1], device.index)
