"""Training in virtual time whose steps are never alike: lengths, expert counts and modules differ from step to step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings
from ds_fgoffload.planning.plan_file import PlanStore
from ds_fgoffload.planning.planner import PlanGoal, plan_round
from ds_fgoffload.planning.tuner import FIRST_CAUTION
from ds_fgoffload.profiling.profile import RoundProfile
from ds_fgoffload.runtime.hooks import ModuleHooks
from ds_fgoffload.runtime.offloader import Offloader
from ds_fgoffload.saved.eligibility import Eligibility
from ds_fgoffload.saved.transfer import Transfer
from ds_fgoffload.schedule.plan import Plan
from tests.helpers.simulated import SimulatedStreams

LAYERS = 12
BYTES_PER_TOKEN = 1
MS_PER_TOKEN = 1e-4
MS_PER_TOKEN_SQUARED = 1e-9


@dataclass(frozen=True)
class Work:
    """What one step is like."""

    tokens: int
    shares: tuple[float, ...]
    """By layer, how much its unit saves and computes, in proportion to the tokens; 0: it is not called."""


class Unit(nn.Module):
    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self.streams = streams
        self.tokens = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _Save.apply(x, self.streams, self.tokens)
        assert isinstance(y, torch.Tensor)
        return y


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, streams: SimulatedStreams, tokens: int) -> torch.Tensor:
        hidden = torch.zeros(max(4, BYTES_PER_TOKEN * tokens) // 4)
        ctx.save_for_backward(hidden)
        ctx.streams, ctx.ms = streams, MS_PER_TOKEN * tokens
        streams.work(ctx.ms, hidden)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        ctx.streams.work(2 * ctx.ms)
        return gradient + hidden[:1], None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, streams: SimulatedStreams, ms: float) -> torch.Tensor:
        ctx.streams, ctx.ms = streams, ms
        streams.work(ms)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.streams.work(2 * ctx.ms)
        return gradient, None, None


class Model(nn.Module):
    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self.streams = streams
        self.units = nn.ModuleList(Unit(streams) for _ in range(LAYERS))
        self.shares: tuple[float, ...] = ()

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        tokens = ids.numel()
        for unit, share in zip(self.units, self.shares, strict=True):
            x = _Attend.apply(x, self.streams, MS_PER_TOKEN * tokens + MS_PER_TOKEN_SQUARED * tokens * tokens)
            if share:
                unit.tokens = round(share * tokens)
                x = unit(x)
        return x


class Training:
    def __init__(self, goal: PlanGoal | None, link_bytes_per_ms: float, store: PlanStore | None = None) -> None:
        self.streams = SimulatedStreams(link_bytes_per_ms)
        self.model = Model(self.streams)
        units: dict[str, nn.Module] = {f"units.{number}": unit for number, unit in enumerate(self.model.units)}
        pool = HostPool(HostPoolSettings(1 << 30, pin_memory=False), slab_bytes=1 << 12)
        eligibility = Eligibility(self.model, 0, self.streams.device)
        self.offloader = Offloader(
            units,
            {},
            eligibility,
            Plan(),
            Transfer(self.streams),
            pool,
            raise_when_full=False,
            goal=goal,
            plan_store=store,
        )  # fmt: skip
        self.hooks = ModuleHooks(self.model, units, self.offloader)

    def step(self, work: Work) -> None:
        x = torch.ones(1, requires_grad=True)
        self.model.shares = work.shares
        self.streams.work(0.05)
        self.model(torch.empty(work.tokens, dtype=torch.uint8), x).backward()
        self.streams.read()


@dataclass(frozen=True)
class Measured:
    freed_bytes: int
    waited: float
    """Of the time without offloading."""
    most_waited: float
    """The same in the worst step."""


def measured(steps: list[Work], goal: PlanGoal, link_bytes_per_ms: float, learning: int) -> Measured:
    """Of the steps after the first ``learning``."""
    profiles = profiles_of(steps, link_bytes_per_ms)[learning:]
    training = Training(goal, link_bytes_per_ms)
    for work in steps[:learning]:
        training.step(work)
    training.streams.peak_bytes = 0
    waited_ms = []
    for work in steps[learning:]:
        before_ms = training.streams.waited_ms
        training.step(work)
        waited_ms.append(training.streams.waited_ms - before_ms)
    lengths_ms = [profile.length_ms for profile in profiles]
    plain_bytes = max(profile.peak_bytes for profile in profiles)
    return Measured(
        plain_bytes - training.streams.peak_bytes,
        sum(waited_ms) / sum(lengths_ms),
        max(waited / length for waited, length in zip(waited_ms, lengths_ms, strict=True)),
    )


def clairvoyant(steps: list[Work], goal: PlanGoal, link_bytes_per_ms: float, learning: int) -> Measured:
    """What plans would do that are made for each step from its own profile."""
    profiles = profiles_of(steps, link_bytes_per_ms)[learning:]
    forecasts = [plan_round(profile, goal, caution=FIRST_CAUTION) for profile in profiles]
    waits = [forecast.stalled_ms / profile.length_ms for forecast, profile in zip(forecasts, profiles, strict=True)]
    freed_bytes = max(profile.peak_bytes for profile in profiles) - max(forecast.peak_bytes for forecast in forecasts)
    stalled_ms = sum(forecast.stalled_ms for forecast in forecasts)
    return Measured(freed_bytes, stalled_ms / sum(profile.length_ms for profile in profiles), max(waits))


def profiles_of(steps: list[Work], link_bytes_per_ms: float) -> list[RoundProfile]:
    """Of each step without offloading."""
    training = Training(PlanGoal(), link_bytes_per_ms)
    tuner = training.offloader._tuner
    assert tuner is not None
    found: list[RoundProfile] = []
    recorder = tuner._recorder

    def consider(recorded: Any) -> None:
        found.append(recorded.profile)

    tuner._consider = consider  # type: ignore[method-assign]
    for work in steps:
        training.step(work)
    training.step(steps[-1])
    training.offloader.stats()
    recorder.end()
    rate = link_bytes_per_ms
    return [replace(one, d2h_bytes_per_ms=rate, h2d_bytes_per_ms=rate) for one in found[: len(steps)]]


ALL = (1.0,) * LAYERS


def uniform(draw: random.Random) -> Iterator[Work]:
    while True:
        yield Work(draw.randint(2048, 8192), ALL)


def buckets(draw: random.Random) -> Iterator[Work]:
    while True:
        yield Work(draw.choice((2048, 4096, 8192)), ALL)


def experts(part: float) -> Callable[[random.Random], Iterator[Work]]:
    def steps(draw: random.Random) -> Iterator[Work]:
        while True:
            yield Work(8192, tuple(draw.uniform(1 - part, 1 + part) for _ in range(LAYERS)))

    return steps


def accumulation(draw: random.Random) -> Iterator[Work]:
    while True:
        for tokens in (8192, 8192, 4096, draw.randint(512, 4096)):
            yield Work(tokens, ALL)


def optional_sites(draw: random.Random) -> Iterator[Work]:
    while True:
        yield Work(8192, tuple(float(draw.random() > 0.15) for _ in range(LAYERS)))


def everything(draw: random.Random) -> Iterator[Work]:
    while True:
        shares = tuple(draw.uniform(0.7, 1.3) * (draw.random() > 0.1) for _ in range(LAYERS))
        yield Work(draw.randint(2048, 8192), shares)


KINDS: dict[str, Callable[[random.Random], Iterator[Work]]] = {
    "uniform lengths": uniform,
    "three buckets": buckets,
    "expert counts within 5%": experts(0.05),
    "expert counts within 50%": experts(0.5),
    "mixed micro-batches": accumulation,
    "sites that come and go": optional_sites,
    "all at once": everything,
}
