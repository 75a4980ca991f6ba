"""Host time per saved tensor: pack and unpack of many small tensors, beside TRL's ``OffloadActivations``.

Both are timed at the same place, inside autograd's hooks, on the same model, in turn, and by the clock on the wall.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ds_fgoffload
from benchmarks.measure import save, trl_activation_offloading
from ds_fgoffload.runtime import hooks


class Clock:
    """Host seconds and calls spent in hooks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def around(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(argument: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(argument)
            finally:
                self.seconds += time.perf_counter() - begin
                self.calls += 1

        return timed


class Block(nn.Module):
    """Saves several small tensors per call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        out: torch.Tensor = x + self.down(torch.sigmoid(self.gate(y)) * torch.tanh(self.up(y)))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()

    trl = trl_activation_offloading()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(arguments.width) for _ in range(arguments.blocks))).cuda()
    x = torch.randn(arguments.rows, arguments.width, device="cuda")
    original = hooks.saved_tensors_hooks

    def run(around: Callable[[], AbstractContextManager[Any]]) -> list[float]:
        times = []
        for _ in range(arguments.repeats):
            model.zero_grad(set_to_none=False)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with around():
                model(x).square().mean().backward()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return times

    figures: dict[str, Any] = {"arguments": vars(arguments)}
    wall: dict[str, list[float]] = {"plain": [], "ours": [], "trl": []}
    per_call: dict[str, list[float]] = {"ours": [], "trl": []}
    split: dict[str, list[float]] = {"pack": [], "unpack": []}
    calls: dict[str, int] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    run(nullcontext)
    for _ in range(arguments.rounds):
        wall["plain"] += run(nullcontext)
        gradients["plain"] = [p.grad.clone() for p in model.parameters()]

        context = trl.OffloadActivations(use_streams=True, min_offload_size=1024)
        context.update_model_params(model)
        run(lambda context=context: context)
        wall["trl"] += run(lambda context=context: context)
        gradients["trl"] = [p.grad.clone() for p in model.parameters()]
        clock = Clock()
        context.pack_hook = clock.around(context.pack_hook)
        context.unpack_hook = clock.around(context.unpack_hook)
        run(lambda context=context: context)
        per_call["trl"].append(clock.seconds / clock.calls * 1e6)
        calls["trl"] = clock.calls // arguments.repeats

        attachment = ds_fgoffload.attach(model, {"modules": ["*"], "min_tensor_bytes": 1024})
        run(nullcontext)
        wall["ours"] += run(nullcontext)
        gradients["ours"] = [p.grad.clone() for p in model.parameters()]
        packs, unpacks = Clock(), Clock()
        hooks.saved_tensors_hooks = lambda pack, unpack, packs=packs, unpacks=unpacks: original(
            packs.around(pack), unpacks.around(unpack)
        )
        run(nullcontext)
        hooks.saved_tensors_hooks = original
        per_call["ours"].append((packs.seconds + unpacks.seconds) / (packs.calls + unpacks.calls) * 1e6)
        calls["ours"] = (packs.calls + unpacks.calls) // arguments.repeats
        split["pack"].append(packs.seconds / packs.calls * 1e6)
        split["unpack"].append(unpacks.seconds / unpacks.calls * 1e6)
        figures["stats"] = {k: v for k, v in vars(attachment.stats()).items() if k not in ("units", "skipped")}
        attachment.detach()
    figures["hook_calls_per_step"] = calls
    figures["us_per_hook_call"] = {k: {"median": statistics.median(v), "all": v} for k, v in per_call.items()}
    figures["us_per_call_ours"] = {k: statistics.median(v) for k, v in split.items()}
    figures["us_in_hooks_per_step"] = {k: statistics.median(v) * calls[k] for k, v in per_call.items()}
    figures["wall_ms"] = {k: {"median": statistics.median(v), "min": min(v), "max": max(v)} for k, v in wall.items()}
    figures["gradients_equal"] = {
        k: all(torch.equal(a, b) for a, b in zip(gradients[k], gradients["plain"], strict=True))
        for k in ("ours", "trl")
    }
    save("host_time", figures)
    for key, value in figures.items():
        print(key, value)
    assert saved_tensors_hooks is original


if __name__ == "__main__":
    main()
