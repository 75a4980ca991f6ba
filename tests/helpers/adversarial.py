"""Random training programs on adversarial streams, each compared with the same program without offloading.

``python -m tests.helpers.adversarial --seeds 10000`` runs as many as asked; ``--seed 17`` runs one, and says all that
it finds.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import nn

from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings
from ds_fgoffload.planning import tuner as tuner_module
from ds_fgoffload.planning.planner import PlanGoal
from ds_fgoffload.runtime import offloader as offloader_module
from ds_fgoffload.runtime.hooks import ModuleHooks
from ds_fgoffload.runtime.offloader import Offloader
from ds_fgoffload.saved.eligibility import Eligibility
from ds_fgoffload.saved.transfer import Transfer
from ds_fgoffload.schedule.plan import Action, Plan, Site
from tests.helpers.adversary import AdversarialStreams

WIDTHS = (8, 24, 64)


# The grammar of models: every block takes and returns (rows, width).


class Gated(nn.Module):
    """Its input is saved by several operations, and its gates are views of one storage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fused = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.fused(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(0, 1) / x.shape[1]).softmax(dim=-1)
        return torch.tanh(scores @ v * x.sigmoid() + x)


class Strided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.t().contiguous().t()
        even = x[:, ::2].repeat_interleave(2, dim=1)
        row = x[:1].expand_as(x) * (x > 0).to(torch.uint8)
        order = torch.arange(x.shape[1]).flip(0).expand_as(x).contiguous()
        x = x.gather(1, order)
        return (turned * even).tanh() + row * x.to(torch.bfloat16).sigmoid().float()


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class _SavesAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        inner = x.sin()
        out = inner * x
        ctx.save_for_backward(x, None, inner, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, _, inner, _ = ctx.saved_tensors
        again = ctx.saved_tensors[3]
        return grad * (inner + x * x.cos()) + 0 * again


class Custom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SavesAll.apply(x)


class InPlace(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.linear(x).add_(1.0).unsafe_chunk(2, dim=-1)  # they count changes apart
        return torch.cat([first.sigmoid_(), second.tanh_()], dim=-1).mul_(2).relu_()


class Wasteful(nn.Module):
    """Part of what it computes reaches nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unused = self.linear(x).exp().sigmoid()
        return self.linear(x).tanh() + unused.detach().mean()


class Glanced(nn.Module):
    """The first to save the input of ``inner`` is an operation that backward never comes to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5
        unused = x.sin()
        return self.inner(x) + unused.detach().mean()


class OnSideStream(nn.Module):
    """Runs ``inner`` on a stream of its own, forward and backward, with the waits that a careful user puts in."""

    streams: AdversarialStreams | None = None

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        home = None if self.streams is None else self.streams.current
        side = None if home is None else home.partition(".")[0] + ".side"
        x = _Switch.apply(x, self.streams, home, side)
        return _Switch.apply(self.inner(x), self.streams, side, home)


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, streams, old, new):
        ctx.way = streams, new, old
        _switch(streams, old, new)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        _switch(*ctx.way)
        return grad, None, None, None


def _switch(streams: AdversarialStreams | None, old: str, new: str) -> None:
    if streams is not None and old != new:
        streams.join(new, old)
        streams.switch(new)


class Model(nn.Module):
    """Returns what is trained, and something beside it that may never be."""

    def __init__(self, blocks: list[nn.Module], aside: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.aside = aside

    def forward(self, x: torch.Tensor, calls: int) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            for _ in range(calls):
                x = block(x)
        return x.square().mean(), self.aside(x).square().mean()


def _random_block(dice: random.Random, width: int, depth: int) -> nn.Module:
    leaves: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(width, width),
        lambda: nn.LayerNorm(width),
        lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)),
        lambda: Gated(width),
        Strided,
        Custom,
        lambda: InPlace(width),
        lambda: Wasteful(width),
    ]
    inner_ones: list[Callable[[], nn.Module]] = [
        lambda: Residual(_random_block(dice, width, depth - 1)),
        lambda: nn.Sequential(*(_random_block(dice, width, depth - 1) for _ in range(2))),
        lambda: OnSideStream(_random_block(dice, width, depth - 1)),
        lambda: Glanced(OnSideStream(nn.Linear(width, width))),
    ]
    return dice.choice(leaves + inner_ones * 2 if depth else leaves)()


@dataclass
class Step:
    """One thing that the program does with one micro-batch."""

    verb: str  # forward, backward, backward_again, aside, drop
    micro_batch: int


@dataclass
class Track:
    """A model and what is done with it, on compute streams of its own."""

    name: str
    model: Model
    calls: int
    inputs: list[torch.Tensor]
    program: list[Step]
    losses: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    results: list[torch.Tensor] = field(default_factory=list)

    def run(self, step: Step) -> None:
        if step.verb == "forward":
            torch.manual_seed(step.micro_batch)
            self.losses[step.micro_batch] = self.model(self.inputs[step.micro_batch], self.calls)
            self.results += [loss.detach() for loss in self.losses[step.micro_batch]]
        elif step.verb == "drop":
            del self.losses[step.micro_batch]
        else:
            loss, aside = self.losses[step.micro_batch]
            (aside if step.verb == "aside" else loss).backward(retain_graph=step.verb != "last")

    def grads(self) -> list[torch.Tensor | None]:
        return [tensor.grad for tensor in (*self.inputs, *self.model.parameters())]


def _random_track(dice: random.Random, name: str) -> Track:
    width = dice.choice(WIDTHS)
    blocks = [_random_block(dice, width, dice.randrange(3)) for _ in range(dice.randint(1, 4))]
    model = Model(blocks, _random_block(dice, width, 1))
    rows = [dice.randint(1, 12) for _ in range(dice.randint(1, 4))]
    inputs = [torch.randn(n, width, requires_grad=True) for n in rows]
    program = _random_program(dice, len(rows)) * dice.choice(
        [1, 1, 1, 1, 1, 5]
    )  # what repeats is recorded, and planned
    return Track(name, model, dice.choice([1, 1, 2]), inputs, program)


def _random_program(dice: random.Random, micro_batches: int) -> list[Step]:
    """Every micro-batch's steps in their order, shuffled into each other."""
    lines = []
    for micro_batch in range(micro_batches):
        verbs = ["forward"]
        if dice.random() < 0.9:
            verbs += dice.choice([["last"], ["last"], ["backward", "last"], ["aside", "last"], ["backward"]])
        lines.append([Step(verb, micro_batch) for verb in (*verbs, "drop")])
    if dice.random() < 0.5:  # all forward first
        firsts = [line.pop(0) for line in lines]
        return firsts + list(_shuffled_together(dice, lines))
    return list(_shuffled_together(dice, lines))


def _shuffled_together(dice: random.Random, lines: list[list[Any]]) -> Iterator[Any]:
    lines = [list(line) for line in lines if line]
    while lines:
        line = dice.choice(lines)
        yield line.pop(0)
        lines = [line for line in lines if line]


class _WatchedTransfer:
    """Mixed into a Transfer: tells the adversary what cannot be seen from the streams."""

    def offload(self, source, lease, compute, stats):
        self._streams.writer = compute
        return super().offload(source, lease, compute, stats)

    def pack(self, parts, offsets, size_bytes, compute):
        packed = super().pack(parts, offsets, size_bytes, compute)
        self._streams.read(compute, parts)
        return packed


@dataclass
class Findings:
    """What is wrong (nothing should be), and what was done."""

    problems: list[str]
    stats: list[Any]


def run_seed(seed: int, transfer_class: type[Transfer] = Transfer) -> Findings:
    """Builds a program from ``seed``, runs it with and without offloading, and compares."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    tracks = [_random_track(dice, f"track{n}") for n in range(dice.choice([1, 1, 2]))]
    order = list(_shuffled_together(dice, [[(n, step) for step in t.program] for n, t in enumerate(tracks)]))
    plain = [deepcopy(t) for t in tracks]
    for n, step in order:
        plain[n].run(step)

    streams = AdversarialStreams(seed)
    pool = HostPool(HostPoolSettings(dice.choice([1 << 30, 1 << 30, 1 << 14]), pin_memory=False), slab_bytes=1 << 12)
    pool.add_user()
    transfer_class = type("Watched", (_WatchedTransfer, transfer_class), {})
    with mock.patch.object(tuner_module, "LAST_ROUNDS", 1):
        offloaders = [_attach(dice, t.model, transfer_class(streams), pool, streams) for t in tracks]
    sizes = {"ALONE_BYTES": dice.choice([0, 512, 1 << 20]), "PARCEL_BYTES": dice.choice([1, 2048, 1 << 20])}
    crashes: list[str] = []
    gc_was_enabled = gc.isenabled()
    gc.disable()  # deaths come where the program puts them, so that a seed always does the same
    try:
        with (
            mock.patch.multiple(offloader_module, **sizes),
            mock.patch.object(tuner_module, "LAST_ROUNDS", 1),
            mock.patch.object(offloader_module.logger, "warning"),  # of full pools
            mock.patch.object(sys, "unraisablehook", lambda what: crashes.append(repr(what.exc_value))),
        ):
            for n, step in order:
                with streams.on(f"{tracks[n].name}.compute"):
                    tracks[n].run(step)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return Findings([f"{type(error).__name__}: {error}"], [])
    finally:
        if gc_was_enabled:
            gc.enable()
    streams.drain()
    return Findings(
        [*crashes, *streams.faults, *_differences(plain, tracks), *_remains(offloaders, pool)],
        [o.stats() for o in offloaders],
    )


def _attach(
    dice: random.Random, model: Model, transfer: Transfer, pool: HostPool, streams: AdversarialStreams
) -> Offloader:
    named = {name: module for name, module in model.named_modules() if type(module) is not nn.ModuleList}
    for module in named.values():
        if isinstance(module, OnSideStream):
            module.streams = streams
    names = list(named)
    units = set(dice.sample(names, dice.randint(1, min(len(names), 6))))
    excluded = {name for name in names if name not in units and dice.random() < 0.1}
    window = dice.choice([None, None, 0, 1, 2000, 20000])
    prefetch = dice.choice([None, None, 0, 1, 2000, 20000, 1 << 30])
    kept = {Site(unit, 0, dice.randrange(4)): Action.KEEP for unit in units if dice.random() < 0.2}
    offloader = Offloader(
        {name: named[name] for name in units},
        {name: named[name] for name in excluded},
        Eligibility(model, dice.choice([0, 0, 600]), streams.device),
        Plan(sites=kept, release_window_bytes=window, prefetch_window_bytes=prefetch),
        transfer,
        pool,
        raise_when_full=False,
        goal=dice.choice(
            [None, PlanGoal(everything=True), PlanGoal(), PlanGoal(max_overhead=0.5), PlanGoal(target_saved_bytes=4000)]
        ),
    )
    ModuleHooks(model, {name: named[name] for name in names if name in units or name in excluded}, offloader)
    return offloader


def _differences(plain: list[Track], offloaded: list[Track]) -> Iterator[str]:
    for one, other in zip(plain, offloaded, strict=True):
        if not all(map(torch.equal, one.results, other.results)):
            yield f"{one.name}: the losses differ"
        for n, (expected, found) in enumerate(zip(one.grads(), other.grads(), strict=True)):
            same = expected is found if expected is None or found is None else torch.equal(expected, found)
            if not same:
                yield f"{one.name}: gradient {n} differs"


def _remains(offloaders: list[Offloader], pool: HostPool) -> Iterator[str]:
    leased = pool.stats().leased_bytes
    if leased:
        yield f"{leased} bytes are still leased"
    for offloader in offloaders:
        live = offloader.stats().live_host_bytes
        if live:
            yield f"live_host_bytes is {live}"


def main(
    seeds: int = typer.Option(1000, help="how many programs to run"),
    first: int = typer.Option(0, help="the first seed"),
    seed: int | None = typer.Option(None, help="run this one only"),
    processes: int = typer.Option(2, help="processes that share the work"),
) -> None:
    """Runs random programs; the first that goes wrong ends it, with a line to run it again."""
    console = Console()
    if seed is not None:
        findings = run_seed(seed)
        console.print("\n".join(findings.problems) or "nothing is wrong", findings.stats)
        raise typer.Exit(bool(findings.problems))
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        work = pool.imap(_problems_of, range(first, first + seeds), chunksize=20)
        for number, problems in track(work, description="programs", total=seeds, console=console):
            if problems:
                console.print(f"seed {number}:", *problems[:10], sep="\n  ")
                console.print(f"again: python -m tests.helpers.adversarial --seed {number}")
                raise typer.Exit(1)
    console.print(f"{seeds} programs in {time.monotonic() - began:.0f} s: nothing is wrong")


def _problems_of(seed: int) -> tuple[int, list[str]]:
    return seed, run_seed(seed).problems


if __name__ == "__main__":
    typer.run(main)
