"""A thousand steps whose shapes change every step: the pool's memory must stop growing, and every lease come back.

Runs on any device; lengths are drawn anew each step, as with packed sequences.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

import ds_fgoffload
from benchmarks.decoder import Decoder, DecoderShape
from benchmarks.measure import save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--shortest", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    device = get_accelerator().device_name()
    torch.manual_seed(0)
    draw = random.Random(0)  # noqa: S311 - lengths, not secrets
    shape = DecoderShape(hidden=arguments.width, intermediate=4 * arguments.width, layers=4, heads=4, vocabulary=256)
    model = Decoder(shape).to(device)
    attachment = ds_fgoffload.attach(model, {"modules": ["layers.*"], "min_tensor_bytes": "16KiB"})
    pool = ds_fgoffload.host_pool()
    pinned = []
    for _ in range(arguments.steps):
        length = draw.randint(arguments.shortest, arguments.longest)
        model(torch.randint(0, 256, (1, length), device=device)).backward()
        model.zero_grad()
        pinned.append(pool.stats().pinned_bytes)
    counts, stats = pool.stats(), attachment.stats()
    figures: dict[str, Any] = {
        "arguments": vars(arguments),
        "pinned_bytes_after_step": {
            str(step): pinned[step - 1] for step in (1, 10, 30, 60, 100, 300, 1000) if step <= len(pinned)
        },
        "last_step_that_grew": max((i + 1 for i in range(1, len(pinned)) if pinned[i] > pinned[i - 1]), default=1),
        "peak_leased_bytes": counts.peak_leased_bytes,
        "leased_bytes_at_end": counts.leased_bytes,
        "live_host_bytes_at_end": stats.live_host_bytes,
        "offloaded_bytes": stats.offloaded_bytes,
        "late_reloads": stats.late_reloads,
        "allocations": counts.allocations,
        "hits": counts.hits,
    }
    attachment.detach()
    figures["pinned_bytes_after_detach"] = pool.stats().pinned_bytes
    save("changing_shapes", figures)
    for key, value in figures.items():
        print(key, value)


if __name__ == "__main__":
    main()
