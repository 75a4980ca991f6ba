"""A 1.1B-parameter decoder under DeepSpeed: the memory its offloaded MLPs give back, the time, the rate of the link.

With and without in turn, in one process and on one engine: ``attach``, steps, ``detach``, steps.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Any

import deepspeed
import torch

import ds_fgoffload
from benchmarks.decoder import Decoder, DecoderShape
from benchmarks.measure import GIB, Steps, copy_rates, engine_step, run_steps, save, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--modules", nargs="+", default=["layers.*.mlp"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="core")
    arguments = parser.parse_args()
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", "29511")

    torch.manual_seed(0)
    torch.cuda.set_device(0)
    model = Decoder(DecoderShape(layers=arguments.layers)).bfloat16()
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": arguments.batch,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        },
    )
    tokens = torch.randint(0, 32000, (arguments.batch, arguments.length), device="cuda")
    step = partial(engine_step, engine, tokens)
    section = {"modules": arguments.modules}
    plain: list[Steps] = []
    offloaded: list[Steps] = []
    figures: dict[str, Any] = {"arguments": vars(arguments), "section": section}
    for round_ in range(arguments.rounds):
        plain.append(run_steps(step, warmup=2, repeats=arguments.repeats))
        attachment = ds_fgoffload.attach(engine, section)
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        first_step_s = time.perf_counter() - begin
        offloaded.append(run_steps(step, warmup=2, repeats=arguments.repeats))
        if round_ == 0:
            figures["first_step_s"] = first_step_s
            before = attachment.stats()
            step()
            after = attachment.stats()
            figures["per_step_bytes"] = {
                key: getattr(after, key) - getattr(before, key)
                for key in (
                    "saved_bytes",
                    "offloaded_bytes",
                    "reloaded_bytes",
                    "used_in_place_bytes",
                    "held_bytes",
                    "kept_bytes",
                    "late_reloads",
                )
            }
            figures["rates"] = copy_rates(step)
            figures["pool"] = vars(ds_fgoffload.host_pool().stats())
            print(attachment.report())
        attachment.detach()
    figures["plain"] = summary(plain)
    figures["offloaded"] = summary(offloaded)
    moved_gib = figures["per_step_bytes"]["offloaded_bytes"] / GIB
    freed_gib = figures["plain"]["max_reserved_gib"] - figures["offloaded"]["max_reserved_gib"]
    figures["moved_gib"] = moved_gib
    figures["freed_reserved_gib"] = freed_gib
    figures["freed_of_moved"] = freed_gib / moved_gib
    figures["losses_equal"] = figures["plain"]["losses"] == figures["offloaded"]["losses"]
    save(arguments.name, figures)
    for key, value in figures.items():
        if key not in ("plain", "offloaded"):
            print(key, value)
    for key in ("plain", "offloaded"):
        print(key, {k: v for k, v in figures[key].items() if k != "rounds"})


if __name__ == "__main__":
    main()
