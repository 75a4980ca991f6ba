"""An ordinary DeepSpeed training script: it trains the byte model with whatever the DeepSpeed configuration says."""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import deepspeed.comm as dist
import torch
from data import ByteBatches, library_text
from deepspeed.accelerator import get_accelerator
from model import ByteLM, ByteLMShape
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils import deterministic


def parse_arguments() -> argparse.Namespace:
    """The command line; DeepSpeed's launcher adds ``--local_rank``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed_config", type=Path, required=True, help="DeepSpeed's configuration file")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--seq", type=int, default=256, help="bytes in a sequence")
    parser.add_argument("--micro-batch", type=int, help="sequences per rank; default: what the configuration says")
    parser.add_argument("--layers", type=int, default=ByteLMShape.layers, help="decoder layers")
    parser.add_argument("--width", type=int, default=ByteLMShape.width, help="model width; the MLP is 11/4 of it")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the text")
    parser.add_argument("--threads", type=int, help="threads per rank on CPU; default: torch's choice")
    parser.add_argument("--deterministic", action="store_true", help="only kernels that repeat bit for bit")
    parser.add_argument("--log-every", type=int, default=5, help="steps between the lines of progress")
    parser.add_argument("--losses-json", type=Path, help="write losses, times and a checksum of the weights here")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args()


def repeatable(arguments: argparse.Namespace) -> None:
    """Fix what may differ from run to run, before anything touches the device."""
    torch.manual_seed(arguments.seed)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module


def load_config(path: Path, micro_batch: int | None) -> dict[str, Any]:
    """The DeepSpeed configuration with the micro-batch of the command line, if one was given."""
    config: dict[str, Any] = json.loads(path.read_text())
    if micro_batch is not None:
        config.pop("train_batch_size", None)
        config["train_micro_batch_size_per_gpu"] = micro_batch
    return config


class Display(Protocol):
    """What a step reports to."""

    def __call__(self, step: int, loss: float, tokens_per_second: float) -> None: ...


@contextmanager
def display(steps: int, log_every: int, *, visible: bool) -> Iterator[Display]:
    """A progress bar on a terminal and a line every few steps anywhere, on one rank only."""
    console = Console(quiet=not visible)
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)

        def show(step: int, loss: float, tokens_per_second: float) -> None:
            text = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
            progress.update(task, completed=step, description=text)
            if step in (1, steps) or step % log_every == 0:
                console.print(f"step {step:>4}/{steps}  {text}", highlight=False)

        yield show


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a number that every rank has."""
    dist.all_reduce(value)
    mean: float = value.item() / dist.get_world_size()
    return mean


def weights_checksum(module: torch.nn.Module) -> str:
    """SHA-256 over all weights by name; under ZeRO-3 each is gathered in turn."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(engine: Any, batches: ByteBatches, steps: int, tokens_per_step: int, show: Display) -> list[float]:
    """Run ``steps`` optimizer steps; returns the loss of each, averaged over micro-batches and ranks."""
    losses = []
    micro_batches = engine.gradient_accumulation_steps()
    for step in range(steps):
        started = time.perf_counter()
        loss_sum = torch.zeros((), device=engine.device)
        for micro_batch in range(micro_batches):
            loss = engine(*batches.batch(step * micro_batches + micro_batch, engine.device))
            engine.backward(loss)
            engine.step()
            loss_sum += loss.detach()
        losses.append(mean_over_ranks(loss_sum / micro_batches))
        show(step + 1, losses[-1], tokens_per_step / (time.perf_counter() - started))
    return losses


def main() -> None:
    """Train, then write down what came out."""
    arguments = parse_arguments()
    repeatable(arguments)
    model = ByteLM(ByteLMShape(layers=arguments.layers, width=arguments.width, mlp_width=arguments.width * 11 // 4))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=load_config(arguments.deepspeed_config, arguments.micro_batch),
    )
    micro_batch = engine.train_micro_batch_size_per_gpu()
    batches = ByteBatches(
        library_text(),
        sequence=arguments.seq,
        micro_batch=micro_batch,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        seed=arguments.seed,
    )
    tokens_per_step = micro_batch * engine.gradient_accumulation_steps() * dist.get_world_size() * arguments.seq
    first_rank = dist.get_rank() == 0

    started = time.perf_counter()
    with display(arguments.steps, arguments.log_every, visible=first_rank) as show:
        losses = train(engine, batches, arguments.steps, tokens_per_step, show)
    seconds = time.perf_counter() - started

    on_cpu = engine.device.type == "cpu"
    max_reserved_bytes = None if on_cpu else get_accelerator().max_memory_reserved()
    checksum = weights_checksum(engine.module)
    if not first_rank:
        return
    if max_reserved_bytes is not None:
        print(f"max reserved device memory on rank 0: {max_reserved_bytes / 2**20:,.0f} MiB")
    if arguments.losses_json:
        result = {
            "losses": losses,
            "losses_hex": [loss.hex() for loss in losses],
            "weights_sha256": checksum,
            "seconds": seconds,
            "tokens_per_second": tokens_per_step * arguments.steps / seconds,
            "ranks": dist.get_world_size(),
            "device": engine.device.type,
            "max_reserved_bytes": max_reserved_bytes,
        }
        arguments.losses_json.parent.mkdir(parents=True, exist_ok=True)
        arguments.losses_json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
