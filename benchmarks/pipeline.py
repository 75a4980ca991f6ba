"""DeepSpeed's pipeline engine on two GPUs: memory and time per stage, with and without offloading, in turn.

``python -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.pipeline``
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn import functional as F

import ds_fgoffload
from benchmarks.decoder import DecoderShape, Layer, rotary_tables
from benchmarks.measure import GIB, Stalls, run_steps, save, summary


class PipelineLayer(nn.Module):
    """A decoder layer that makes its own rotary tables, since a stage hands on one tensor."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.layer = Layer(shape)
        self.half = shape.hidden // shape.heads // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, *rotary_tables(self.half, x.shape[1], x))
        return out


class Head(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modules", nargs="+", default=["*.down_proj", "*.self_attn"])
    arguments = parser.parse_args()
    torch.cuda.set_device(arguments.local_rank)
    deepspeed.init_distributed()
    shape = DecoderShape(hidden=4096, intermediate=12288, heads=32, key_value_heads=8)
    torch.manual_seed(0)
    model = PipelineModule(
        [
            LayerSpec(nn.Embedding, shape.vocabulary, shape.hidden),
            *(LayerSpec(PipelineLayer, shape) for _ in range(arguments.layers)),
            LayerSpec(Head, shape),
        ],
        num_stages=2,
        loss_fn=loss_of,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": arguments.micro_batches,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        },
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, shape.vocabulary, (1, arguments.length), generator=generator).cuda()

    def batches() -> Any:
        while True:
            yield tokens, tokens

    iterator = batches()

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine.train_batch(iterator)
        return loss

    sections: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "offloaded": {"modules": arguments.modules},
        "offloaded_and_buffers": {"modules": arguments.modules, "release_pipeline_buffers": True},
    }
    rounds: dict[str, list[Any]] = {name: [] for name in sections}
    extra: dict[str, Any] = {}
    for _ in range(arguments.rounds):
        for name, section in sections.items():
            attachment = ds_fgoffload.attach(engine, section) if section is not None else None
            rounds[name].append(run_steps(step, warmup=2, repeats=arguments.repeats))
            if attachment is not None:
                before = attachment.stats()
                with Stalls(attachment) as stalls:
                    step()
                after = attachment.stats()
                keys = ("offloaded_bytes", "reloaded_bytes", "used_in_place_bytes", "held_bytes", "late_reloads")
                extra[name] = {k: getattr(after, k) - getattr(before, k) for k in keys}
                extra[name]["stalled_ms"] = stalls.milliseconds()
                attachment.detach()
    mine = {name: {**summary(steps), **extra.get(name, {})} for name, steps in rounds.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        for stage, modes in enumerate(everyone):
            for name, mode in modes.items():
                mode["freed_reserved_gib"] = modes["plain"]["max_reserved_gib"] - mode["max_reserved_gib"]
                mode["added_time"] = mode["step_ms_median"] / modes["plain"]["step_ms_median"] - 1
                print(stage, name, {k: v for k, v in mode.items() if k not in ("rounds", "losses")})
                if "offloaded_bytes" in mode:
                    print("   moved", mode["offloaded_bytes"] / GIB, "GiB a step")
            equal = modes["plain"]["losses"] == modes["offloaded"]["losses"] == modes["offloaded_and_buffers"]["losses"]
            print(stage, "losses equal", equal)
        save("pipeline", {"arguments": vars(arguments), "stages": everyone})


if __name__ == "__main__":
    main()
