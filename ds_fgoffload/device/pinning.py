"""Page-locked host memory, of the accelerator's making or registered with it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_fgoffload.compat.private import empty_host_cache
from ds_fgoffload.device.streams import accelerator_device


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
    if empty_host_cache is not None and torch.accelerator.is_available():
        empty_host_cache()


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
