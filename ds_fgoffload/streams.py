"""Order on the device: streams, fences, copies and memory of one device, behind one interface.

Nothing else in the package talks to the accelerator. Every wait here is a wait of one stream for another: the host is
never blocked by it. On a device whose work is synchronous (CPU) streams and fences are ``None`` and the copies are done
when :meth:`Streams.copy` returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger


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
        """Blocks the host until ``fence`` is reached. Not to be used inside a step."""

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
        self._event = accelerator.Event
        with accelerator.device(device.index):
            self.d2h = accelerator.Stream()
            self.h2d = accelerator.Stream()
        # Asked for at every saved tensor. torch makes a new object of it each time, at several times the cost.
        self._current_handle = getattr(torch._C, "_cuda_getCurrentRawStream", None) if device.type == "cuda" else None
        self._by_handle: dict[int, Any] = {}
        self._count = 0
        self._count_lock = threading.Lock()

    def compute(self) -> Any:
        if self._current_handle is None:
            return self._current_stream(self.device.index)
        handle = self._current_handle(self.device.index)
        stream = self._by_handle.get(handle)
        if stream is None:
            stream = self._by_handle[handle] = self._current_stream(self.device.index)
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        if stream == self.compute():
            return nullcontext()
        context: AbstractContextManager[Any] = self._on(stream)
        return context

    def fence(self, stream: Any) -> Fence:
        event = self._event()
        with self._count_lock:  # numbers are in the order of the stream also where two threads put fences there
            event.record(stream)
            self._count += 1
            return Fence(stream, self._count, event)

    def wait(self, stream: Any, fence: Fence | None) -> None:
        if fence is not None and fence.stream != stream:
            stream.wait_event(fence.event)

    def synchronize(self, fence: Fence | None) -> None:
        if fence is not None:
            fence.event.synchronize()

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self._on(stream):
            destination.copy_(source, non_blocking=True)

    def allocate(self, stream: Any, size_bytes: int) -> torch.Tensor:
        with self.on(stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)


def accelerator_device() -> torch.device:
    """The device that this process computes on."""
    accelerator = get_accelerator()
    name = accelerator.device_name()
    return torch.device("cpu") if name == "cpu" else torch.device(name, accelerator.current_device())


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


def allocate_pinned(size_bytes: int) -> torch.Tensor:
    """Host memory (uint8, one-dimensional) that the accelerator page-locks its own way.

    Raises whatever the accelerator raises if the system refuses.
    """
    accelerator = get_accelerator()
    if hasattr(accelerator, "pin_empty"):  # absent before DeepSpeed 0.19; it spares a pageable copy of the same size
        memory: torch.Tensor = accelerator.pin_empty(size_bytes, dtype=torch.uint8)
    else:
        memory = accelerator.pin_memory(torch.empty(size_bytes, dtype=torch.uint8))
    return memory


def register_host(address: int, size_bytes: int) -> bool:
    """Page-locks mapped memory for the device; false if this accelerator cannot, or not memory that it did not make.

    On a device without streams (CPU) there is nothing to lock for, and it is true. Raises ``RuntimeError`` if the
    system refuses; nothing of that error is left for the next kernel launch.
    """
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return True
    try:
        if hasattr(accelerator, "register_host_memory"):  # DeepSpeed 0.19
            registered = bool(accelerator.register_host_memory(address, size_bytes))
        elif registered := accelerator.device_name() == "cuda":
            torch.cuda.check_error(int(_runtime().cudaHostRegister(address, size_bytes, 0)))
    except RuntimeError:
        _consume_error()
        raise
    if registered:
        _tell_deepspeed(size_bytes)
    return registered


def unregister_host(address: int) -> None:
    """Undoes :func:`register_host`. An error of it is logged: nobody can do anything about it."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return
    try:
        if hasattr(accelerator, "unregister_host_memory"):
            accelerator.unregister_host_memory(address)
        else:
            torch.cuda.check_error(int(_runtime().cudaHostUnregister(address)))
    except RuntimeError as error:
        _consume_error()
        logger.warning(f"host memory could not be unpinned: {error}")


def pci_address() -> str | None:
    """The device's address on the PCI bus, as the system writes it; ``None`` if torch does not tell."""
    if get_accelerator().device_name() != "cuda":
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    numbers = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in numbers:
        return None
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def unpin_unused_host() -> None:
    """Gives the system what torch's pinned allocator keeps for reuse: a tensor's end alone unpins nothing."""
    # torch.accelerator has had it since torch 2.12
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.accelerator.is_available():
        empty()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _consume_error() -> None:
    """A failed call is also kept as the runtime's last error, which the next kernel launch would report as its own.

    torch has no call that clears it: the runtime that torch has loaded is asked directly, else a launch is sacrificed.
    """
    if get_accelerator().device_name() != "cuda":
        return
    name, function = ("libamdhip64", "hipGetLastError") if torch.version.hip else ("libcudart", "cudaGetLastError")
    for path in _loaded_libraries(name):
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(path), function)()
            return
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=accelerator_device()).fill_(1)


def _loaded_libraries(name: str) -> list[str]:
    try:
        fields = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    paths = {parts[5] for parts in fields if len(parts) == 6}
    return sorted(path for path in paths if Path(path).name.startswith(f"{name}.so"))


def _tell_deepspeed(size_bytes: int) -> None:
    """DeepSpeed adds up what is pinned through its accelerator, and says so in its log."""
    with contextlib.suppress(ImportError):  # DeepSpeed before 0.19
        from deepspeed.utils.pin_memory_tracker import track_pinned_memory

        track_pinned_memory(size_bytes)
