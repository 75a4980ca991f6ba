"""What every benchmark does alike: steps timed on the device, peaks of memory, copy rates, and the file of results."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import importlib.util
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ds_fgoffload import Attachment

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
ON_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Steps:
    """Several steps of one mode, in steady state."""

    step_ms: list[float]
    max_reserved_bytes: int
    max_allocated_bytes: int
    loss: float


@dataclass(frozen=True)
class Pairs:
    """Times of a mode, and of plain training just before or after."""

    own_ms: list[float]
    plain_ms: list[float]

    def __add__(self, more: Pairs) -> Pairs:
        return Pairs(self.own_ms + more.own_ms, self.plain_ms + more.plain_ms)

    def summary(self) -> dict[str, Any]:
        """What a step takes more, in ms: the median, and the mean with its standard error; as a fraction of plain."""
        more_ms = [own - plain for own, plain in zip(self.own_ms, self.plain_ms, strict=True)]
        plain_ms = statistics.median(self.plain_ms)
        deviation_ms = statistics.stdev(more_ms) if len(more_ms) > 1 else 0.0
        return {
            "pairs": asdict(self),
            "added_ms": statistics.median(more_ms),
            "added_time": statistics.median(more_ms) / plain_ms,
            "added_time_mean": statistics.fmean(more_ms) / plain_ms,
            "added_time_error": deviation_ms / len(more_ms) ** 0.5 / plain_ms,
        }


def run_steps(step: Callable[[], torch.Tensor], *, warmup: int, repeats: int, until_s: float = math.inf) -> Steps:
    """Times ``step`` on the device; the allocator's cache is emptied once after the warm-up and the peaks reset.

    Ends before ``repeats`` steps once ``time.monotonic()`` is past ``until_s``. Without a GPU times are the host's and
    memory is not known.
    """
    for _ in range(warmup):
        step()
    settle()
    step()
    return time_steps(step, repeats, until_s)


def time_steps(step: Callable[[], torch.Tensor], repeats: int, until_s: float = math.inf) -> Steps:
    """Times steps, without any before them, and the peaks of memory during them."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    loss = torch.zeros(())
    while len(times) < repeats and not (times and time.monotonic() > until_s):
        milliseconds, loss = timed(step)
        times.append(milliseconds)
    return Steps(times, *peaks(), float(loss))


def time_pairs(
    step: Callable[[], torch.Tensor], plain: Callable[[], torch.Tensor], pairs: int, until_s: float
) -> Pairs:
    """Times steps of a mode and of plain training in turn, each first in every second pair.

    Steps of one mode alone drift by per cents with the clock of the device, and so does what is measured minutes later;
    the two steps of a pair are as near in time as can be.
    """
    own_ms: list[float] = []
    plain_ms: list[float] = []
    while len(own_ms) < pairs and not (own_ms and time.monotonic() > until_s):
        turns = [(step, own_ms), (plain, plain_ms)]
        for function, times in turns if len(own_ms) % 2 else reversed(turns):
            times.append(timed(function)[0])
    return Pairs(own_ms, plain_ms)


def engine_step(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """A step of a DeepSpeed engine whose module returns the loss."""
    loss = engine(tokens)
    engine.backward(loss)
    engine.step()
    detached: torch.Tensor = loss.detach()
    return detached


def settle() -> None:
    """Waits for the device and gives back what the allocator keeps."""
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def timed(step: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Milliseconds of one step on the device, and its loss."""
    if not ON_GPU:
        start_s = time.perf_counter()
        loss = step()
        return (time.perf_counter() - start_s) * 1e3, loss
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    loss = step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), loss


def peaks() -> tuple[int, int]:
    """Most bytes reserved and allocated on the device since the peaks were reset."""
    return (torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()) if ON_GPU else (0, 0)


def pinned_bytes() -> int:
    """Host memory that torch's own allocator has page-locked, in use or not."""
    if not ON_GPU:
        return 0
    stats = torch.cuda.host_memory_stats()
    # before torch 2.12 "allocated" was what is in use
    return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))


class BytesToHost(TorchDispatchMode):
    """Adds up what is copied from the device to the host while it is entered, whoever copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket
        source = args[1] if name is torch.ops.aten.copy_ else args[0] if name is torch.ops.aten._to_copy else None
        if source is not None and source.device.type != "cpu" and result.device.type == "cpu":
            self.total += source.numel() * source.element_size()
        return result


def gradient_sums(model: torch.nn.Module) -> str:
    """A digest of the bits of all gradients: equal bits, equal digest."""
    sums = [p.grad.view(torch.int16).sum(dtype=torch.int64) for p in model.parameters() if p.grad is not None]
    return hashlib.sha256(str(torch.stack(sums).tolist()).encode()).hexdigest()[:16]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels whose results have the same bits each time; slower, and not for what is timed.

    An operation that has no such kernel raises. (If it only warned, flash attention would stay as it is.)
    """
    fills = torch.utils.deterministic.fill_uninitialized_memory
    # torch asks for it; cuBLAS reads it when it starts, so that the timed steps keep their workspace
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def summary(rounds: Sequence[Steps]) -> dict[str, Any]:
    """Median, least and most of the times of all rounds; the highest peaks; the losses."""
    times = [ms for steps in rounds for ms in steps.step_ms]
    return {
        "step_ms_median": statistics.median(times),
        "step_ms_min": min(times),
        "step_ms_max": max(times),
        "max_reserved_gib": max(steps.max_reserved_bytes for steps in rounds) / GIB,
        "max_allocated_gib": max(steps.max_allocated_bytes for steps in rounds) / GIB,
        "losses": [steps.loss for steps in rounds],
        "rounds": [asdict(steps) for steps in rounds],
    }


def copy_rates(step: Callable[[], torch.Tensor]) -> dict[str, dict[str, float]]:
    """GB/s of the copies of one step between the device and pinned memory, while they run."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    rates = {}
    for direction, name in (("d2h", "Memcpy DtoH"), ("h2d", "Memcpy HtoD")):
        copies = [e for e in events if e.get("cat") == "gpu_memcpy" and e["name"].startswith(name)]
        copies = [e for e in copies if e["args"]["bytes"] >= 1 << 20]
        size_bytes = sum(e["args"]["bytes"] for e in copies)
        busy_us = sum(e["dur"] for e in copies)
        rates[direction] = {
            "copies": len(copies),
            "bytes": size_bytes,
            "busy_ms": busy_us / 1e3,
            "gb_per_s": size_bytes / busy_us / 1e3 if busy_us else 0.0,
        }
    return rates


class Stalls:
    """Times every wait of a compute stream for a copy, on the device, while it is entered."""

    def __init__(self, attachment: Attachment) -> None:
        self._streams = attachment._offloader._transfer._streams
        self._wait = self._streams.wait
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> Stalls:
        self._streams.wait = self._timed_wait
        return self

    def __exit__(self, *_: object) -> None:
        del self._streams.wait

    def milliseconds(self) -> float:
        """Sum of the waits so far."""
        torch.cuda.synchronize()
        return sum(before.elapsed_time(after) for before, after in self._pairs)

    def _timed_wait(self, stream: Any, fence: Any) -> None:
        if stream in (self._streams.d2h, self._streams.h2d):
            self._wait(stream, fence)
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        self._wait(stream, fence)
        after.record(stream)
        self._pairs.append((before, after))


def trl_activation_offloading() -> ModuleType:
    """TRL's ``models/activation_offloading.py``, loaded alone: the package around it needs more than this does."""
    package = importlib.util.find_spec("trl")
    assert package is not None and package.origin is not None, "TRL is not installed: pip install --no-deps trl"
    path = Path(package.origin).parent / "models" / "activation_offloading.py"
    specification = importlib.util.spec_from_file_location("activation_offloading", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def save(name: str, figures: dict[str, Any]) -> None:
    """Writes the figures with all that is needed to make them again."""
    record = {
        "benchmark": name,
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT") or _commit(),
        "command": "python -m " + shlex.join([f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "deepspeed": deepspeed.__version__},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
        **figures,
    }
    folder = Path(os.environ.get("OUT", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
