"""Losses and gradients on the device with and without offloading, bit for bit.

{plain module, ZeRO 0, 1, 2, 3} x {fp32, bf16} x {gradient accumulation 1, 3}, on as many GPUs as the launcher gives:
``python -m benchmarks.exactness`` on one, ``python -m deepspeed.launcher.runner --module benchmarks.exactness`` on all.
With ``--recompute PATTERN ...`` those modules are recomputed as well.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.utils import safe_get_full_grad

import ds_fgoffload
from benchmarks.decoder import Decoder, DecoderShape
from benchmarks.measure import save

SHAPE = DecoderShape(hidden=512, intermediate=1536, layers=4, heads=8, key_value_heads=4, vocabulary=1024)
SECTION: dict[str, Any] = {
    "modules": ["layers.*.mlp", "layers.*.self_attn"],
    "recompute": [],
    "min_tensor_bytes": 1024,
}
STEPS = 2


def run(stage: int | None, dtype: torch.dtype, accumulation: int, *, offload: bool) -> dict[str, Any]:
    """Losses, gradients and counts of a few steps of one combination."""
    torch.manual_seed(0)
    model = Decoder(SHAPE).to(dtype)
    losses, gradients = [], []
    if stage is None:
        engine = model.cuda()
        attachment = ds_fgoffload.attach(engine, SECTION) if offload else None
    else:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "bf16": {"enabled": dtype is torch.bfloat16},
        }
        if offload:
            config["fine_grained_offload"] = SECTION
        engine, *_ = ds_fgoffload.initialize(model=model, config=config)
        attachment = ds_fgoffload.get(engine)
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for _ in range(STEPS):
        for micro_batch in range(accumulation):
            tokens = torch.randint(0, SHAPE.vocabulary, (2, 256), generator=generator).cuda()
            loss = engine(tokens)
            losses.append(loss.detach().clone())
            if stage is None:
                loss.backward()
                continue
            engine.backward(loss)
            if micro_batch == accumulation - 1:
                found = [safe_get_full_grad(p) for p in engine.module.parameters()]
                gradients += [g.clone() for g in found if g is not None]
            engine.step()
        if stage is None:
            gradients += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
    del loss
    counts = None
    if attachment is not None:
        stats = attachment.stats()
        counts = {"offloaded": stats.offloaded_bytes, "reloaded": stats.reloaded_bytes, "live": stats.live_host_bytes}
        if SECTION["recompute"]:
            counts |= {"recomputed": stats.recomputed_bytes, "recomputations": stats.recomputations}
        attachment.detach()
    if stage is not None:
        engine.destroy()
    return {"losses": losses, "gradients": gradients, "counts": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--stages", nargs="+", default=["plain", "0", "1", "2", "3"])
    parser.add_argument("--recompute", nargs="+", default=[], help='patterns, such as "*norm" "*.act_fn"')
    arguments = parser.parse_args()
    SECTION["recompute"] = arguments.recompute
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", "29512")
    torch.cuda.set_device(arguments.local_rank)
    torch.use_deterministic_algorithms(mode=True)
    deepspeed.init_distributed()
    rows = []
    for name in arguments.stages:
        stage = None if name == "plain" else int(name)
        for dtype in (torch.float32, torch.bfloat16):
            for accumulation in (1, 3):
                without = run(stage, dtype, accumulation, offload=False)
                with_ = run(stage, dtype, accumulation, offload=True)
                equal = {
                    key: len(without[key]) == len(with_[key]) > 0
                    and all(torch.equal(a, b) for a, b in zip(without[key], with_[key], strict=True))
                    for key in ("losses", "gradients")
                }
                row = {
                    "engine": name if stage is None else f"ZeRO-{stage}",
                    "dtype": str(dtype),
                    "accumulation": accumulation,
                    "compared": {key: len(with_[key]) for key in equal},
                    "equal": equal,
                    **with_["counts"],
                }
                rows.append(row)
                if dist.get_rank() == 0:
                    print(row, flush=True)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    if dist.get_rank() == 0:
        bad = [r for rows in everyone for r in rows if not all(r["equal"].values()) or r["live"] or not r["reloaded"]]
        suffix = "_recompute" if arguments.recompute else ""
        save(f"exactness_{dist.get_world_size()}gpu{suffix}", {"ranks": everyone, "unequal": bad})
        print(f"{sum(map(len, everyone))} combinations, {len(bad)} unequal")


if __name__ == "__main__":
    main()
