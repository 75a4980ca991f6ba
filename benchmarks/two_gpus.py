"""Several GPUs under DeepSpeed: what offloading frees and costs on each rank, on one engine, setting by setting.

``python -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.two_gpus --case zero1 --seconds 120``; the other
cases are ``zero3`` and ``pipeline`` (one stage a rank). ``--model deepseek`` takes layers of that stack instead of
dense ones; ``--setting 'name={"max_overhead": 0.02}'`` adds a section. The file of results is written after every
setting. The learning rate is 0, so that every step has the same loss.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_fgoffload
from benchmarks import deepseek, settings
from benchmarks.decoder import Decoder, DecoderShape
from benchmarks.measure import GIB, ON_GPU, Stalls, engine_step, run_steps, save, summary
from benchmarks.pipeline import Head, PipelineLayer, loss_of

COUNTED = ("saved_bytes", "offloaded_bytes", "reloaded_bytes", "used_in_place_bytes", "held_bytes", "late_reloads")


class PipelineDeepSeekLayer(nn.Module):
    """A layer that makes its own rotary tables, since a stage hands on one tensor."""

    def __init__(self, shape: deepseek.DeepSeekShape) -> None:
        super().__init__()
        self.shape = shape
        self.layer = deepseek.Layer(shape)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, *deepseek.rotary(self.shape, x.shape[1], x))
        return out


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--case", choices=("zero1", "zero3", "pipeline"), required=True)
    parser.add_argument("--model", choices=("dense", "deepseek"), default="dense")
    parser.add_argument("--layers", type=int, help="default: 16 dense ones or 4 of deepseek, a pipeline 16 or 8")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a pipeline")
    parser.add_argument(
        "--settings", nargs="*", default=list(settings.SEVERAL_GPUS), help="those compared; default: all"
    )
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=JSON", help="one more section")
    parser.add_argument("--seconds", type=float, default=240, help="no setting begins that would not end before this")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=settings.LEARNING_STEPS)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself")
    parser.add_argument("--name")
    arguments = parser.parse_args(given)
    arguments.name = arguments.name or f"on_time_2gpu_{arguments.case}"
    if arguments.tiny:
        arguments.length, arguments.layers, arguments.micro_batches = 64, 4, 4
    return arguments


def sections(arguments: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """The sections to compare, None for plain training."""
    kind = "deepseek" if arguments.model == "deepseek" else "llama8b"
    # a pipeline's layers have numbers for names
    base: dict[str, Any] = {"modules": [p.replace("layers.*.", "*.") for p in settings.SELECTED[kind]]}
    if arguments.tiny:
        base["min_tensor_bytes"] = 0
    named = {name: settings.SEVERAL_GPUS[name] for name in arguments.settings}
    for setting in arguments.setting:
        name, _, text = setting.partition("=")
        named[name] = json.loads(text)
    return {"plain": None, **{name: {**base, **section} for name, section in named.items()}}


def shape_of(arguments: argparse.Namespace) -> Any:
    if arguments.model == "deepseek":
        shape: Any = deepseek.TINY if arguments.tiny else deepseek.DeepSeekShape()
        layers = arguments.layers or (8 if arguments.case == "pipeline" else 4)
    elif arguments.tiny:
        shape, layers = DecoderShape(64, 128, 2, 4, 2, 128), arguments.layers
    else:
        shape, layers = DecoderShape(4096, 14336, 16, 32, 8), arguments.layers or 16
    return type(shape)(**{**vars(shape), "layers": layers})


def make_step(arguments: argparse.Namespace) -> tuple[Any, Callable[[], torch.Tensor]]:
    """An engine, and a whole step of it."""
    shape = shape_of(arguments)
    device = torch.device(get_accelerator().current_device_name())
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, shape.vocabulary, (1, arguments.length), generator=generator).to(device)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3 if arguments.case == "zero3" else 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
    }
    torch.manual_seed(0)
    if arguments.case == "pipeline":
        config["gradient_accumulation_steps"] = arguments.micro_batches
        layer = PipelineDeepSeekLayer if arguments.model == "deepseek" else PipelineLayer
        with device:
            model: Any = PipelineModule(
                [
                    LayerSpec(nn.Embedding, shape.vocabulary, shape.hidden),
                    *(LayerSpec(layer, shape) for _ in range(shape.layers)),
                    LayerSpec(Head, shape),
                ],
                num_stages=dist.get_world_size(),
                loss_fn=loss_of,
                partition_method="uniform",
            )
        engine, *_ = deepspeed.initialize(model=model, config=config)

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            while True:
                yield tokens, tokens

        iterator = batches()

        def train_batch() -> torch.Tensor:
            loss: torch.Tensor = engine.train_batch(iterator)
            return loss.detach()

        return engine, train_batch

    with device:
        model = (deepseek.DeepSeek if arguments.model == "deepseek" else Decoder)(shape).bfloat16()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine, partial(engine_step, engine, tokens)


def measure(
    engine: Any, step: Callable[[], torch.Tensor], section: dict[str, Any] | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One setting on this rank: its steps, and for ours what a step moved and stalled."""
    if section is None:
        return {"steps": run_steps(step, warmup=2, repeats=arguments.repeats)}
    attachment = ds_fgoffload.attach(engine, section)
    try:
        measured: dict[str, Any] = {"steps": run_steps(step, warmup=arguments.warmup, repeats=arguments.repeats)}
        before = attachment.stats()
        if ON_GPU:
            with Stalls(attachment) as stalls:
                step()
            measured["stalled_ms"] = stalls.milliseconds()
        else:
            step()
        after = attachment.stats()
        measured["per_step"] = {key: getattr(after, key) - getattr(before, key) for key in COUNTED}
        measured["pinned_gib"] = ds_fgoffload.host_pool().stats().pinned_bytes / GIB
    finally:
        attachment.detach()
    return measured


def goes_on(expected_s: float, until_s: float) -> bool:
    """Whether every rank has the time; every rank must ask."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, time.monotonic() + expected_s < until_s)
    return all(answers)


def gathered(measured: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every rank's settings, compared with its own plain training."""
    mine = {}
    for name, rounds in measured.items():
        mine[name] = {**rounds[0], **summary([one["steps"] for one in rounds])}
        del mine[name]["steps"]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for modes in ranks:
        plain = modes["plain"]
        for mode in modes.values():
            mode["freed_reserved_gib"] = plain["max_reserved_gib"] - mode["max_reserved_gib"]
            mode["freed_share"] = mode["freed_reserved_gib"] / plain["max_reserved_gib"] if ON_GPU else None
            mode["added_time"] = mode["step_ms_median"] / plain["step_ms_median"] - 1
            mode["losses_equal"] = set(mode["losses"]) == set(plain["losses"])
    return ranks


def main(given: list[str] | None = None) -> None:
    arguments = parse(given)
    until_s = time.monotonic() + arguments.seconds
    get_accelerator().set_device(arguments.local_rank)
    deepspeed.init_distributed()
    chosen = sections(arguments)
    engine, step = make_step(arguments)
    measured: dict[str, list[dict[str, Any]]] = {}
    longest_s = 0.0
    for _ in range(arguments.rounds):
        # plain once more at the end, so that what changes with time falls on both
        for name, section in [*chosen.items(), ("plain", None)]:
            if measured and not goes_on(longest_s, until_s):
                continue
            start_s = time.monotonic()
            measured.setdefault(name, []).append(measure(engine, step, section, arguments))
            ranks = gathered(measured)
            longest_s = max(longest_s, time.monotonic() - start_s)
            if dist.get_rank() == 0:
                save(arguments.name, {"arguments": vars(arguments), "sections": chosen, "ranks": ranks})
                for rank, modes in enumerate(ranks):
                    shown = {k: v for k, v in modes[name].items() if k not in ("rounds", "losses")}
                    print(rank, name, shown, flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001
        # A rank that fails must not leave the others waiting for it: the launcher ends them when it sees this.
        traceback.print_exc()
        os._exit(1)
