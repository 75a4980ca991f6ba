"""The host pool against torch's pinned allocator and DeepSpeed's pool: the same leases replayed through each.

Two traces of a thousand steps: lengths drawn anew each step, and a mixture of experts whose token counts are. Runs on
any device; on a GPU memory is really pinned, and the rates of growth and of copies into the pool are measured too.
Without one, what torch's allocator would hold is computed from its rule (powers of two, reused within their size).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from deepspeed.runtime.activation_checkpointing.offload_activations import _ActivationOffloadEngine
from rich.console import Console
from rich.table import Table

from benchmarks.measure import GIB, save
from ds_fgoffload.device.streams import make_streams
from ds_fgoffload.host_memory import slabs as region
from ds_fgoffload.host_memory.free_ranges import ALIGNMENT_BYTES, rounded_up
from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings

LAYERS, WARM_UP_STEPS = 24, 60
ON_GPU = torch.cuda.is_available()
HIDDEN = 2048 if ON_GPU else 256
Step = list[tuple[int, int]]
"""Rows and columns of the bfloat16 tensors that the forward of a step offloads, in order."""


def lengths(draw: random.Random, steps: int) -> Iterator[Step]:
    """Each step has a length between 512 and 8192; a layer saves its input, two projections and an activation."""
    for _ in range(steps):
        tokens = draw.randint(512, 8192)
        yield [(tokens, width) for _ in range(LAYERS) for width in (HIDDEN, HIDDEN, 2 * HIDDEN, 4 * HIDDEN)]


def experts(draw: random.Random, steps: int) -> Iterator[Step]:
    """8192 tokens a step, each to two of eight experts, unevenly and anew in every layer."""
    for _ in range(steps):
        step: Step = []
        for _ in range(LAYERS):
            weights = [draw.gammavariate(2.0, 1.0) for _ in range(8)]
            tokens = [int(2 * 8192 * weight / sum(weights)) for weight in weights]
            step += [(chosen, width) for chosen in tokens for width in (HIDDEN, HIDDEN // 2)]
        yield [shape for shape in step if shape[0]]


class Allocator(Protocol):
    """What the traces are replayed through."""

    def take(self, shape: tuple[int, int]) -> Any: ...

    def give_back(self, block: Any) -> None: ...

    def figures(self) -> dict[str, float]:
        """Bytes held, allocations and hits; cumulative."""


class Ours:
    def __init__(self) -> None:
        self.pool = HostPool(HostPoolSettings(64 * GIB))

    def take(self, shape: tuple[int, int]) -> Any:
        lease = self.pool.lease(2 * shape[0] * shape[1])
        assert lease is not None, self.pool.last_refusal
        return lease

    def give_back(self, block: Any) -> None:
        block.give_back()

    def figures(self) -> dict[str, float]:
        stats = self.pool.stats()
        return {
            "held_bytes": stats.pinned_bytes,
            "allocations": stats.allocations,
            "hits": stats.hits,
            "system_ms": stats.pinning_ms,
            "waited_ms": stats.waited_ms,
        }


class Torchs:
    """``torch.empty(pin_memory=True)``; without a GPU, its rule."""

    def __init__(self) -> None:
        self._free: dict[int, int] = defaultdict(int)
        self._held = self._allocations = self._takes = 0
        if ON_GPU:
            torch._C._host_emptyCache()
            self._before = torch.cuda.host_memory_stats()

    def take(self, shape: tuple[int, int]) -> Any:
        self._takes += 1
        if ON_GPU:
            return torch.empty(shape, dtype=torch.bfloat16, pin_memory=True)
        size = 1 << (2 * shape[0] * shape[1] - 1).bit_length()
        if self._free[size]:
            self._free[size] -= 1
        else:
            self._held += size
            self._allocations += 1
        return size

    def give_back(self, block: Any) -> None:
        if not ON_GPU:
            self._free[block] += 1

    def figures(self) -> dict[str, float]:
        if ON_GPU:
            now = torch.cuda.host_memory_stats()
            self._held = now["allocated_bytes.current"] - self._before.get("allocated_bytes.current", 0)
            self._allocations = now["num_host_alloc"] - self._before.get("num_host_alloc", 0)
        return {
            "held_bytes": self._held,
            "allocations": self._allocations,
            "hits": self._takes - self._allocations,
        }


class DeepSpeeds:
    """The buffers of its offloading of checkpoint inputs, without the copies; from torch's allocator where it pins."""

    def __init__(self) -> None:
        self._engine = _ActivationOffloadEngine(use_pin_memory=ON_GPU, use_streams=False)
        self._torch = Torchs()
        self._hits = self._takes = 0

    def take(self, shape: tuple[int, int]) -> Any:
        pooled = self._engine._cpu_buffer_pool_count
        buffer, key = self._engine._empty_cpu_like(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        hit = self._engine._cpu_buffer_pool_count < pooled
        self._takes += 1
        self._hits += hit
        rounded = None if ON_GPU or hit else self._torch.take(shape)
        return buffer, key, rounded or 1 << (buffer.nbytes - 1).bit_length()

    def give_back(self, block: Any) -> None:
        buffer, key, rounded = block
        pooled = self._engine._cpu_buffer_pool_count
        self._engine._pool_cpu_buffer(key, buffer)
        if self._engine._cpu_buffer_pool_count == pooled and not ON_GPU:
            self._torch.give_back(rounded)

    def figures(self) -> dict[str, float]:
        return {**self._torch.figures(), "hits": self._hits}


def replay(allocator: Allocator, trace: Iterator[Step]) -> dict[str, float]:
    """Takes in forward and gives back in the order of backward; all of a step is on lease at its end."""
    peak_bytes, at_warm_up, last_step_that_grew, grown = 0, {}, 0, 0.0
    for number, step in enumerate(trace, start=1):
        blocks = [allocator.take(shape) for shape in step]
        leased_bytes = sum(rounded_up(2 * rows * columns, ALIGNMENT_BYTES) for rows, columns in step)
        peak_bytes = max(peak_bytes, leased_bytes)
        while blocks:
            allocator.give_back(blocks.pop())
        time.sleep(0.005)  # a step takes time, in which the pool's thread runs
        figures = allocator.figures()
        if figures["allocations"] > grown:
            grown, last_step_that_grew = figures["allocations"], number
        if number == WARM_UP_STEPS:
            at_warm_up = figures
    figures = allocator.figures()
    later = {f"{key}_after_step_60": figures[key] - at_warm_up.get(key, 0) for key in figures if key != "held_bytes"}
    return {
        **figures,
        **later,
        "peak_leased_bytes": peak_bytes,
        "held_over_peak": figures["held_bytes"] / peak_bytes,
        "last_step_that_grew": last_step_that_grew,
    }


def growth(size_bytes: int) -> dict[str, float]:
    """GiB/s at which the pool and torch's allocator come to ``size_bytes``, and what the pool's time went to."""
    spent = {"touch_s": 0.0, "register_s": 0.0}

    def timed(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                spent[key] += time.perf_counter() - begin

        return call

    originals = region.touch, region.register_host
    region.touch, region.register_host = timed("touch_s", originals[0]), timed("register_s", originals[1])
    try:
        pool = HostPool(HostPoolSettings(2 * size_bytes), background=False)
        begin = time.perf_counter()
        for _ in range(size_bytes // GIB):
            assert pool._allocator.grow(lambda: GIB), pool.last_refusal
        seconds = time.perf_counter() - begin
    finally:
        region.touch, region.register_host = originals
    begin = time.perf_counter()
    pool.close()
    found = {"gib_per_s": size_bytes / GIB / seconds, **spent, "give_back_s": time.perf_counter() - begin}
    if ON_GPU:
        begin = time.perf_counter()
        blocks = [torch.empty(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(size_bytes // GIB)]
        found["torch_gib_per_s"] = size_bytes / GIB / (time.perf_counter() - begin)
        del blocks
        torch._C._host_emptyCache()
    return found


def copies(repeats: int = 10) -> dict[str, float]:
    """GB/s between the device and blocks of 256 MiB, in one slab and across the border of two."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams, size = make_streams(device), 256 << 20
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    pool = HostPool(HostPoolSettings(4 * GIB), slab_bytes=32 << 20, background=False)
    halves = [pool.lease(size // 2), pool.lease(size // 2)]
    inside = pool.lease(size)
    for half in halves:
        assert half is not None
        half.give_back()
    across = pool.lease(size)
    found = {}
    for name, lease in (("inside", inside), ("across", across)):
        assert lease is not None
        assert len(lease.beside(source)) == (1 if name == "inside" else 2)
        for direction, stream in (("d2h", streams.d2h), ("h2d", streams.h2d)):
            rates = []
            for _ in range(repeats):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                begin.record(stream)
                for block, part in lease.beside(source):
                    to, of = (block, part) if direction == "d2h" else (part, block)
                    streams.copy(stream, to, of)
                end.record(stream)
                end.synchronize()
                rates.append(size / begin.elapsed_time(end) / 1e6)
            found[f"{direction}_{name}_gb_per_s"] = statistics.median(rates)
        assert torch.equal(lease.memory, source.cpu()), name
        lease.give_back()
    pool.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="host_pool")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth-gib", type=int, default=16 if ON_GPU else 2)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"arguments": vars(arguments), "pinned_for_real": ON_GPU, "traces": {}}
    table = Table(title=f"{arguments.steps} steps{'' if ON_GPU else '; no GPU: nothing is pinned, torch is computed'}")
    for name in ("trace", "through", "held GiB", "held / peak", "allocations", "after step 60", "last at", "hits"):
        table.add_column(name, justify="left" if name in ("trace", "through") else "right")
    for trace in (lengths, experts):
        for through, allocator in (("ds_fgoffload", Ours), ("torch", Torchs), ("DeepSpeed", DeepSpeeds)):
            user: Allocator = allocator()
            draw = random.Random(arguments.seed)  # noqa: S311 - shapes, not secrets
            found = replay(user, trace(draw, arguments.steps))
            if isinstance(user, Ours):
                user.pool.close()
                assert user.pool.stats().pinned_bytes == 0
            del user
            if ON_GPU:
                torch._C._host_emptyCache()
            figures["traces"][f"{trace.__name__}, {through}"] = found
            table.add_row(
                trace.__name__,
                through,
                f"{found['held_bytes'] / GIB:.2f}",
                f"{found['held_over_peak']:.3f}",
                f"{found['allocations']:.0f}",
                f"{found['allocations_after_step_60']:.0f}",
                f"{found['last_step_that_grew']:.0f}",
                f"{found['hits']:.0f}",
            )
    # a virtual machine may itself be given memory only when that is used for the first time
    figures["growth"] = growth(arguments.growth_gib * GIB)
    figures["growth_again"] = growth(arguments.growth_gib * GIB)
    if ON_GPU:
        figures["copies"] = copies()
    Console(width=120).print(table)
    for key in ("growth", "growth_again", "copies"):
        print(key, figures.get(key, "needs a GPU"))
    save(arguments.name, figures)


if __name__ == "__main__":
    main()
