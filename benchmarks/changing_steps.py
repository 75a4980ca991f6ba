"""Transformers' Qwen3 and Qwen3-MoE with lengths that change from step to step: memory and time, learning included.

``python -m benchmarks.changing_steps --model qwen3 --plan-file`` trains 12 layers in bf16 on batches of one sequence:
of 8192 tokens each (``fixed``), of 2048, 4096 or 8192 (``buckets``), of anything from 2048 to 8192 (``uniform``).
Plain training, sections of ours, TRL's ``OffloadActivations`` and gradient checkpointing each get a fresh model of the
same weights and the same lengths, one after another, 30 steps to learn and 60 that count; nothing is emptied in
between. Plain training runs again after ours, for fewer steps, to tell how far the machine has drifted.

``--plan-file`` opens each mode of ours once more with the plan that it wrote. That run begins at the 39th length, so
that its second step has the length of the first run's fortieth. Last, some steps run with deterministic kernels, and
losses and gradients are compared bit by bit with plain training; ours follows its plan there from the first step.

What matters most comes first, and what there is no time for is listed. The file of results is written after every turn.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import json
import math
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import ds_fgoffload
from benchmarks.measure import (
    GIB,
    ON_GPU,
    deterministic,
    gradient_sums,
    peaks,
    pinned_bytes,
    save,
    settle,
    timed,
    trl_activation_offloading,
)
from ds_fgoffload.device.pinning import unpin_unused_host
from ds_fgoffload.planning.tuner import CLASS_WIDTH, SizeClass, Tuner, _planned

SELECTED = ["model.layers.*"]
SECTIONS: dict[str, dict[str, Any]] = {"ours": {}, "ours 1%": {"max_overhead": 0.01}}
"""Sections of ours by the mode's name; ``modules`` are SELECTED."""
OTHERS = ("checkpointing", "trl")
LABELS = {
    "plain": "plain training",
    "checkpointing": "Transformers' gradient checkpointing",
    "trl": "TRL `OffloadActivations`",
}
KINDS = ("fixed", "uniform", "buckets")
"""Of lengths; the order in which they are run."""
SEEDS = {"uniform": "uniform 10", "buckets": "buckets 1"}
"""With these the fortieth step is one of the longest, for the run that loads a plan, and so is one of the first 30."""
AGAIN_STEPS, BEFORE_AGAIN = 27, 3
OTHERS_FIRST = 5
"""Steps before those that count, of the modes that are not ours."""
CHECKED_STEPS, STEPS_BEFORE_CHECK = 6, 16
"""Steps that are compared bit by bit; and before them, where no plan can be loaded, so many in which to learn one."""
PLAN_FROM = 38
"""Where a run with a loaded plan begins in the lengths: its second step is the fortieth."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen3", "qwen3_moe"), default="qwen3")
    parser.add_argument("--lengths", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--modes", nargs="+", default=["*"], help="names or globs; plain training always runs")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=JSON", help="one more section of ours")
    parser.add_argument("--learn", type=int, default=30, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=60, help="that count")
    parser.add_argument(
        "--plan-file", nargs="*", metavar="MODE", help="run these modes of ours (default: all) again with their plan"
    )
    parser.add_argument("--plan-steps", type=int, default=20, help="of that run")
    parser.add_argument("--no-check", action="store_true", help="compare no losses and gradients")
    parser.add_argument("--seconds", type=float, default=500, help="ends before this, the imports not counted")
    parser.add_argument("--longest", type=float, default=20, help="seconds for the steps of a mode that is not ours")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the longest sequence")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--experts", choices=("grouped_mm", "eager"), default="grouped_mm", help="Transformers' own")
    parser.add_argument("--keep-gradients", action="store_true", help="set them to zero, not to None")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself")
    parser.add_argument("--name", help="of the file under results")
    chosen = parser.parse_args(arguments)
    if chosen.tiny:
        chosen.layers, chosen.vocabulary, chosen.length = 2, 128, min(chosen.length, 64)
    if chosen.plan_file == []:
        chosen.plan_file = ["*"]
    chosen.name = chosen.name or f"changing_steps_{chosen.model}"
    return chosen


def config_of(arguments: argparse.Namespace) -> Any:
    """Qwen3-8B's layers; those of Qwen3-30B-A3B with half as many experts, a third wider."""
    common: dict[str, Any] = {
        "num_hidden_layers": arguments.layers,
        "vocab_size": arguments.vocabulary,
        "max_position_embeddings": 32768,
        "use_cache": False,
        "attn_implementation": "sdpa",
        "dtype": torch.bfloat16,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if arguments.model == "qwen3":
        if arguments.tiny:
            return Qwen3Config(hidden_size=64, intermediate_size=128, **heads, **common)
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        return Qwen3Config(hidden_size=4096, intermediate_size=12288, **heads, **common)
    moe: dict[str, Any] = {"norm_topk_prob": True, "experts_implementation": arguments.experts}
    if arguments.tiny:
        moe |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        return Qwen3MoeConfig(hidden_size=64, intermediate_size=128, **moe, **heads, **common)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    moe |= {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}
    return Qwen3MoeConfig(hidden_size=2048, intermediate_size=6144, **moe, **heads, **common)


def lengths_of(kind: str, count: int, longest: int) -> list[int]:
    """The tokens of each step, the same for every mode."""
    draw = random.Random(SEEDS.get(kind))  # noqa: S311 - lengths, not secrets
    if kind == "fixed":
        return [longest] * count
    if kind == "buckets":
        return [draw.choice((longest // 4, longest // 2, longest)) for _ in range(count)]
    return [draw.randint(longest // 4, longest) for _ in range(count)]


class Training:
    """A fresh model, always of the same weights, its optimizer and its tokens."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        device = get_accelerator().device_name()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                model_class = Qwen3ForCausalLM if arguments.model == "qwen3" else Qwen3MoeForCausalLM
                self.model: nn.Module = model_class(config_of(arguments))
        finally:
            torch.set_default_dtype(torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._tokens = torch.randint(0, arguments.vocabulary, (1, arguments.length), device=device)
        self._to_none = not arguments.keep_gradients

    def step(self, length: int, around: AbstractContextManager[Any] | None = None) -> torch.Tensor:
        """One micro-batch and one step of the optimizer; the loss, detached."""
        self.optimizer.zero_grad(set_to_none=self._to_none)
        tokens = self._tokens[:, :length]
        with around or contextlib.nullcontext():
            loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass
class Run:
    """A mode while it is open."""

    step: Callable[[int], torch.Tensor]
    attachment: ds_fgoffload.Attachment | None = None


@contextlib.contextmanager
def plain(training: Training) -> Iterator[Run]:
    yield Run(training.step)


@contextlib.contextmanager
def ours(training: Training, *, section: Mapping[str, Any]) -> Iterator[Run]:
    attachment = ds_fgoffload.attach(training.model, section)
    try:
        yield Run(training.step, attachment)
    finally:
        attachment.detach()


@contextlib.contextmanager
def checkpointing(training: Training) -> Iterator[Run]:
    model: Any = training.model
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield Run(training.step)


@contextlib.contextmanager
def trl(training: Training) -> Iterator[Run]:
    """As its trainers use it: around forward and backward, but not in the output head."""
    manager = trl_activation_offloading().get_act_offloading_ctx_manager(training.model)
    yield Run(partial(training.step, around=manager))


@dataclass(frozen=True)
class Turn:
    """A mode that is opened once, on a fresh model."""

    kind: str
    mode: str
    how: str = "timed"
    """``timed``, ``again`` (plain training, shorter), ``plan`` (with the plan that ``timed`` wrote) or ``check``."""

    @property
    def key(self) -> str:
        return ", ".join((self.kind, self.mode, *([] if self.how == "timed" else [self.how])))


Expected: TypeAlias = tuple[SizeClass, Any]
"""A class of sizes, and its forecast at that time."""


@dataclass
class Step:
    """What was seen of one step."""

    index: int
    """In the lengths."""
    length: int
    ms: float
    host_ms: float
    peak_reserved: int
    """Since the peaks were reset; those of a step alone once learning is over."""
    peak_allocated: int
    between: int
    """Allocated when it was over."""
    pinned: int
    loss: float
    counts: dict[str, float] = field(default_factory=dict)
    """What ours counted more, and ``leased``, the most on lease so far."""
    expected: Expected | None = None
    """What ours went by; None: nothing was planned for this length, or another plan was made meanwhile."""


COUNTED = ("saved_bytes", "offloaded_bytes", "stalled_ms", "late_reloads", "held_bytes")


class Changing:
    """Takes the turns in order of weight, and keeps what was measured, by the turn's key."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.sections = dict(SECTIONS)
        for setting in arguments.setting:
            name, _, section = setting.partition("=")
            self.sections[name] = json.loads(section)
        self.modes = ["plain", *self._chosen([*self.sections, *OTHERS])]
        self.until_s = time.monotonic() + arguments.seconds
        self.lengths = {
            kind: lengths_of(kind, arguments.learn + arguments.steps, arguments.length) for kind in arguments.lengths
        }
        self.steps: dict[str, list[Step]] = {}
        self.checks: dict[str, dict[str, Any]] = {}
        self.predicted: dict[str, list[dict[str, Any]]] = {}
        self.at_start: dict[str, dict[str, float]] = {}
        self.failed: dict[str, str] = {}
        self.not_run: list[str] = []
        self.took_s: dict[str, float] = {}
        self.parameters = 0
        self._folder = tempfile.TemporaryDirectory()

    def _chosen(self, available: Sequence[str]) -> list[str]:
        names = ["plain", *available]
        unknown = [p for p in self.arguments.modes if not any(fnmatch.fnmatchcase(name, p) for name in names)]
        if unknown:
            raise SystemExit(f"--modes: {unknown} match no mode; there are {names}")
        return [name for name in available if any(fnmatch.fnmatchcase(name, p) for p in self.arguments.modes)]

    def turns(self) -> Iterator[Turn]:
        """What matters most first: ours beside plain training, then the losses, then the others."""
        kinds = [kind for kind in KINDS if kind in self.lengths]
        mine = [mode for mode in self.modes if mode in self.sections]
        others = [mode for mode in self.modes if mode in OTHERS]
        checked = "uniform" if "uniform" in kinds else kinds[-1]

        def first(kind: str) -> Iterator[Turn]:
            yield Turn(kind, "plain")
            for mode in mine:
                yield Turn(kind, mode)
                if any(fnmatch.fnmatchcase(mode, pattern) for pattern in self.arguments.plan_file or ()):
                    yield Turn(kind, mode, "plan")
            yield Turn(kind, "plain", "again")

        def checks(modes: Sequence[str]) -> Iterator[Turn]:
            if not self.arguments.no_check:
                yield from (Turn(checked, mode, "check") for mode in modes)

        for kind in kinds[:2]:
            yield from first(kind)
        yield from checks(["plain", *mine])
        for kind in kinds[2:]:
            yield from first(kind)
        for kind in sorted(kinds, key=lambda kind: kind != checked):
            yield from (Turn(kind, mode) for mode in others)
        yield from checks(others)

    def run_all(self) -> None:
        """All turns, as far as the time goes. Before them, a few steps load the kernels."""
        training = Training(self.arguments)
        for kind in KINDS:
            training.step(lengths_of(kind, 1, self.arguments.length)[0])
        self.parameters = sum(p.numel() for p in training.model.parameters())
        del training
        self._clean()
        with self._folder:
            for turn in self.turns():
                self._run_if_possible(turn)

    def _run_if_possible(self, turn: Turn) -> None:
        if turn.mode == "trl" and not ON_GPU:
            self.failed[turn.key] = "needs a GPU"
            return
        if time.monotonic() + self._expected_s(turn) > self.until_s:
            self.not_run.append(turn.key)
            return
        start_s = time.monotonic()
        try:
            self._run(turn)
        except Exception as error:  # noqa: BLE001 - whatever becomes of one mode, the others are measured
            self.failed[turn.key] = f"{type(error).__name__}: {str(error)[:500]}"
            print(turn.key, "FAILED", self.failed[turn.key], flush=True)
        self._clean()
        self.took_s[turn.key] = time.monotonic() - start_s
        self._tell(turn)
        self.save()

    def save(self) -> None:
        """Writes what there is. If figures cannot be worked out, the steps are written all the same."""
        try:
            figures = self.figures()
        except Exception:  # noqa: BLE001 - minutes of a device are in it
            traceback.print_exc()
            steps = {key: {"steps": columns(steps)} for key, steps in self.steps.items()}
            figures = {"arguments": vars(self.arguments), "turns": steps, "checks": self.checks}
        save(self.arguments.name, figures)

    def _expected_s(self, turn: Turn) -> float:
        """As plain training took on these lengths, or nothing is known."""
        took_s = self.took_s.get(Turn(turn.kind, "plain").key, 0.0)
        if turn.how == "timed" and turn.mode in OTHERS:
            took_s = min(took_s, self.arguments.longest)
        share = {"timed": 1.0, "again": 0.4, "plan": 0.3, "check": 0.3}[turn.how]
        return took_s * share

    def _section(self, turn: Turn) -> dict[str, Any]:
        """With a file for the plan of this mode and these lengths; what only reads one gets a copy of it."""
        section = {"modules": SELECTED, **self.sections[turn.mode]}
        if self.arguments.tiny:  # every saved tensor is smaller than the default size
            section["min_tensor_bytes"] = 0
        if self.arguments.plan_file:
            written = self._plan_path(Turn(turn.kind, turn.mode))
            section["plan_file"] = str(self._plan_path(turn))
            if turn.how != "timed" and written.exists():
                self._plan_path(turn).write_bytes(written.read_bytes())
        return section

    def _plan_path(self, turn: Turn) -> Path:
        return Path(self._folder.name) / f"{turn.key}.json"

    def _open(self, turn: Turn, training: Training) -> AbstractContextManager[Run]:
        if turn.mode in self.sections:
            return ours(training, section=self._section(turn))
        return {"plain": plain, "checkpointing": checkpointing, "trl": trl}[turn.mode](training)

    def _run(self, turn: Turn) -> None:
        training = Training(self.arguments)
        with self._open(turn, training) as run:
            if turn.how == "check":
                self._check(turn, training, run)
            else:
                self._time(turn, run)

    def _indices(self, turn: Turn) -> tuple[Sequence[int], int]:
        """Which of the lengths a turn trains on, and after how many steps the peaks are reset each time.

        Others than ours learn nothing, so that they get by with fewer steps.
        """
        learn, count = self.arguments.learn, len(self.lengths[turn.kind])
        if turn.how == "again":
            first = max(0, learn - BEFORE_AGAIN)
            return range(first, min(count, first + BEFORE_AGAIN + AGAIN_STEPS)), BEFORE_AGAIN
        if turn.how == "plan":
            first = min(PLAN_FROM, count // 2)
            return range(first, min(count, first + self.arguments.plan_steps)), 1
        if turn.mode in OTHERS:
            first = min(OTHERS_FIRST, learn)
            return [*range(first), *range(learn, count)], first
        return range(count), learn

    def _time(self, turn: Turn, run: Run) -> None:
        indices, alone_from = self._indices(turn)
        until_s = math.inf if turn.mode not in OTHERS else time.monotonic() + self.arguments.longest
        steps = self.steps[turn.key] = []
        tuner = tuner_of(run)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        self.at_start[turn.key] = {"allocated_gib": allocated() / GIB}
        if run.attachment is not None:
            self.at_start[turn.key]["pool_limit_gib"] = ds_fgoffload.host_pool().stats().limit_bytes / GIB
        before = counts_of(run)
        for done, index in enumerate(indices):
            if time.monotonic() > min(until_s, self.until_s):
                break
            # The tuner looks at the peaks in its first rounds, so that they are not reset then.
            if ON_GPU and (done == alone_from or (done > alone_from and turn.how != "plan")):
                torch.cuda.reset_peak_memory_stats()
            length = self.lengths[turn.kind][index]
            expected = expected_of(tuner, length)
            begin_s = time.perf_counter()
            ms, loss = timed(partial(run.step, length))
            host_ms = (time.perf_counter() - begin_s) * 1e3
            now = counts_of(run)
            more = {key: now[key] - before[key] for key in before if key != "leased"}
            step = Step(index, length, ms, host_ms, *peaks(), allocated(), pinned_by(run), float(loss))
            if run.attachment is not None:
                step.counts = {**more, "leased": now["leased"]}
                after = expected_of(tuner, length)
                step.expected = expected if expected and after and expected[1] is after[1] else None
            steps.append(step)
            before = now
        if turn.how == "timed":  # of the others, the peaks are not those of each step
            self.predicted[turn.key] = [
                planned_of(one, forecast) for one, forecast in distinct(step.expected for step in steps)
            ]

    def _check(self, turn: Turn, training: Training, run: Run) -> None:
        """Losses and gradients bit by bit. Where no plan was loaded, one is learned first, and undone."""
        lengths = self.lengths[turn.kind]
        tuner = tuner_of(run)
        if tuner is not None and tuner.forecast is None:
            before = [p.detach().to("cpu", copy=True) for p in training.model.parameters()]
            for length in lengths[:STEPS_BEFORE_CHECK]:
                run.step(length)
            with torch.no_grad():
                for p, value in zip(training.model.parameters(), before, strict=True):
                    p.copy_(value)
            training.optimizer.state.clear()
        before_counts = counts_of(run)
        losses, sums = [], []
        with deterministic():
            for length in lengths[:CHECKED_STEPS]:
                losses.append(float(run.step(length)))
                sums.append(gradient_sums(training.model))
        offloaded = counts_of(run).get("offloaded_bytes", 0) - before_counts.get("offloaded_bytes", 0)
        self.checks[turn.key] = {"losses": losses, "gradient_sums": sums, "offloaded_bytes": offloaded}

    def _clean(self) -> None:
        gc.collect()
        with contextlib.suppress(Exception):
            ds_fgoffload.host_pool().trim()
        settle()
        with contextlib.suppress(Exception):
            unpin_unused_host()

    def _tell(self, turn: Turn) -> None:
        steps = self.steps.get(turn.key, [])
        took = f"{self.took_s[turn.key]:.0f} s"
        if turn.key in self.checks:
            print(f"{turn.key}: {self.checks[turn.key]}, {took}", flush=True)
        elif steps:
            last = max(step.peak_reserved for step in steps[-20:]) / GIB
            total_s = sum(step.ms for step in steps) / 1e3
            print(f"{turn.key}: {len(steps)} steps, {total_s:.1f} s, reserved {last:.2f} GiB, {took}", flush=True)

    def figures(self) -> dict[str, Any]:
        """Everything so far."""
        rows = {key: self._row(key, steps) for key, steps in self.steps.items() if steps}
        for key, row in rows.items():
            self._compare(key, row)
        for key, row in rows.items():
            kind, mode, *how = key.split(", ")
            at_fixed = rows.get(f"fixed, {mode}", {}).get("after", {}).get("freed_reserved_gib")
            if not how and kind != "fixed" and at_fixed:
                row["after"]["freed_of_fixed"] = row["after"].get("freed_reserved_gib", 0.0) / at_fixed
        config = config_of(self.arguments)
        return {
            "arguments": vars(self.arguments),
            "transformers": transformers.__version__,
            "parameters": self.parameters,
            "config": {key: value for key, value in config.to_dict().items() if isinstance(value, int | float | str)},
            "experts": self.arguments.experts if self.arguments.model == "qwen3_moe" else None,
            "lengths": self.lengths,
            "selected": SELECTED,
            "sections": {mode: self.sections[mode] for mode in self.modes if mode in self.sections},
            "labels": LABELS,
            "turns": rows,
            "checks": self._checked(),
            "took_s": self.took_s,
            "failed": self.failed,
            "not_run": self.not_run,
        }

    def _row(self, key: str, steps: Sequence[Step]) -> dict[str, Any]:
        learn = self.arguments.learn
        row: dict[str, Any] = {"at_start": self.at_start.get(key, {})}
        if not key.endswith((", plan", ", again")):
            row["first"] = part([step for step in steps if step.index < learn])
        row["after"] = part([step for step in steps if step.index >= learn])
        row["steps"] = columns(steps)
        return row

    def _compare(self, key: str, row: dict[str, Any]) -> None:
        """With plain training on the same lengths, step by step."""
        kind, mode, *how = key.split(", ")
        steps, plain_steps = self.steps[key], self.steps.get(f"{kind}, plain", [])
        again = self.steps.get(f"{kind}, plain, again", [])[BEFORE_AGAIN:]
        by_index = {step.index: step for step in plain_steps}
        learn = self.arguments.learn
        for name, own in (
            ("first", [step for step in steps if step.index < learn]),
            ("after", [step for step in steps if step.index >= learn]),
        ):
            beside = [by_index[step.index] for step in own if step.index in by_index]
            if not row.get(name) or len(beside) != len(own):
                continue
            there, here = part(beside), row[name]
            here["freed_reserved_gib"] = there["max_reserved_gib"] - here["max_reserved_gib"]
            here["freed_allocated_gib"] = there["max_allocated_gib"] - here["max_allocated_gib"]
            here["added_time"] = here["total_s"] / there["total_s"] - 1
            here["added_time_median"] = statistics.median(
                mine.ms / other.ms - 1 for mine, other in zip(own, beside, strict=True)
            )
            here["against_again"] = time_over(own, again)
        if how == ["plan"]:
            row["loaded"] = self._loaded(steps, self.steps.get(f"{kind}, {mode}", []))
        if self.predicted.get(key):
            row["predicted"] = [
                found for planned in self.predicted[key] if (found := against_plan(planned, steps, by_index, learn))
            ]

    def _loaded(self, steps: Sequence[Step], first_run: Sequence[Step]) -> dict[str, Any]:
        """The second step of a run that loaded its plan, and the same length in the run that wrote it."""
        by_index = {step.index: step for step in first_run}
        if len(steps) < 2 or steps[1].index not in by_index:
            return {}
        second, there = steps[1], by_index[steps[1].index]
        needs = max(step.counts["leased"] for step in steps)
        rest = steps[1:]
        return {
            "length": second.length,
            "first_runs_step": there.index + 1,
            **{
                name: {"second_step": getattr(second, name) / unit, "first_run": getattr(there, name) / unit}
                for name, unit in (("peak_reserved", GIB), ("peak_allocated", GIB), ("ms", 1), ("pinned", GIB))
            },
            "time_over_first_run": time_over(rest, first_run),
            "offloaded_gib": {
                "second_step": second.counts["offloaded_bytes"] / GIB,
                "first_run": there.counts["offloaded_bytes"] / GIB,
            },
            "most_pinned_gib": max(step.pinned for step in steps) / GIB,
            "most_leased_gib": needs / GIB,
            "pinned_over_leased": max(step.pinned for step in steps) / needs if needs else None,
        }

    def _checked(self) -> dict[str, dict[str, Any]]:
        """Beside plain training."""
        found = {}
        for key, check in self.checks.items():
            expected = self.checks.get(f"{key.split(', ')[0]}, plain, check")
            equal = {}
            if expected is not None:
                equal = {f"{name}_equal": check[name] == expected[name] for name in ("losses", "gradient_sums")}
            found[key] = {**check, **equal}
        return found


def tuner_of(run: Run) -> Tuner | None:
    return None if run.attachment is None else run.attachment._offloader._tuner


def expected_of(tuner: Tuner | None, length: int) -> Expected | None:
    """The class that a step of this length belongs to, and its plan; the same after the step as before."""
    classes = [] if tuner is None else tuner._classes
    nearest = min(classes, key=lambda one: one.distance(length), default=None)
    if nearest is None or nearest.forecast is None or nearest.distance(length) > CLASS_WIDTH:
        return None
    return nearest, nearest.forecast


def distinct(expected: Iterator[Expected | None]) -> list[Expected]:
    """Each plan once."""
    return list({id(one[1]): one for one in expected if one is not None}.values())


def planned_of(of_its_size: SizeClass, forecast: Any) -> dict[str, Any]:
    """What the plan was expected to do, of which only the last of a class is told in full."""
    planned = {"plan": id(forecast), "is_last": forecast is of_its_size.forecast, "size": of_its_size.size}
    if forecast is of_its_size.forecast and of_its_size.profile is not None:
        told = _planned(forecast, of_its_size.profile)
        numbers = {**asdict(told), "freed_bytes": told.freed_bytes}
        planned |= {key: None if value is None else float(value) for key, value in numbers.items()}  # numpy's, too
        planned["tokens"] = [int(size) for size in of_its_size.profile.sizes]
        planned["plans_of_this_class"] = of_its_size.plans
    return planned


def against_plan(
    planned: Mapping[str, Any], steps: Sequence[Step], plain_steps: Mapping[int, Step], learn: int
) -> dict[str, Any] | None:
    """Steps that a plan was for beside what it foresaw. What a step of another length would have had is its share."""
    own = [
        step
        for step in steps
        if step.expected is not None and id(step.expected[1]) == planned["plan"] and step.index >= learn
    ]
    if not own or not planned.get("tokens") or not planned["is_last"]:
        return None
    size = planned["tokens"][0]

    def mean(of: Callable[[Step], float], among: Sequence[Step]) -> float:
        return statistics.fmean(of(step) * size / step.length for step in among)

    def peak(among: Sequence[Step]) -> float:
        return statistics.fmean(
            step.between + (step.peak_allocated - step.between) * size / step.length for step in among
        )

    found: dict[str, Any] = {
        **{key: value for key, value in planned.items() if key != "plan"},
        "steps": len(own),
        "measured_saved_bytes": mean(lambda step: step.counts["saved_bytes"], own),
        "measured_copied_bytes": mean(lambda step: step.counts["offloaded_bytes"], own),
        "measured_stalled_ms": mean(lambda step: step.counts["stalled_ms"], own),
        "measured_peak_bytes": peak(own),
    }
    beside = [plain_steps[step.index] for step in own if step.index in plain_steps]
    if len(beside) == len(own):
        found["measured_peak_without_bytes"] = peak(beside)
        found["measured_freed_bytes"] = found["measured_peak_without_bytes"] - found["measured_peak_bytes"]
        found["measured_added_time"] = sum(s.ms for s in own) / sum(s.ms for s in beside) - 1
        found["planned_added_time"] = planned["stalled_ms"] / mean(lambda step: step.ms, beside)
        found["added_time_error"] = found["measured_added_time"] - found["planned_added_time"]
    for name in ("saved_bytes", "copied_bytes", "freed_bytes", "peak_bytes", "peak_without_bytes"):
        foreseen, measured = planned.get(name), found.get(f"measured_{name}")
        if foreseen is not None and measured:
            found[f"{name}_error"] = foreseen / measured - 1
    return found


def time_over(steps: Sequence[Step], others: Sequence[Step]) -> float | None:
    """How much longer steps took than the others that have the same place in the lengths."""
    by_index = {step.index: step for step in others}
    pairs = [(step.ms, by_index[step.index].ms) for step in steps if step.index in by_index]
    return sum(mine for mine, _ in pairs) / sum(other for _, other in pairs) - 1 if pairs else None


def columns(steps: Sequence[Step]) -> dict[str, list[float]]:
    """For the file: of each step, in MiB where it is memory."""
    found: dict[str, list[float]] = {
        "index": [step.index for step in steps],
        "ms": [round(step.ms, 2) for step in steps],
        "host_ms": [round(step.host_ms, 2) for step in steps],
        "loss": [step.loss for step in steps],
    }
    for name in ("peak_reserved", "peak_allocated", "pinned"):
        found[f"{name}_mib"] = [getattr(step, name) >> 20 for step in steps]
    if steps and steps[0].counts:
        found["offloaded_mib"] = [int(step.counts["offloaded_bytes"]) >> 20 for step in steps]
        found["stalled_ms"] = [round(step.counts["stalled_ms"], 2) for step in steps]
        found["follows_plan"] = [int(step.expected is not None) for step in steps]
    return found


def part(steps: Sequence[Step]) -> dict[str, Any]:
    """Totals and peaks of several steps."""
    if not steps:
        return {}
    figures: dict[str, Any] = {
        "steps": len(steps),
        "total_s": sum(step.ms for step in steps) / 1e3,
        "host_s": sum(step.host_ms for step in steps) / 1e3,
        "max_reserved_gib": max(step.peak_reserved for step in steps) / GIB,
        "max_allocated_gib": max(step.peak_allocated for step in steps) / GIB,
        "pinned_gib": max(step.pinned for step in steps) / GIB,
    }
    for name in COUNTED:
        if name in steps[0].counts:
            figures[name] = sum(step.counts[name] for step in steps)
    if "leased" in steps[0].counts:
        figures["leased_gib"] = max(step.counts["leased"] for step in steps) / GIB
    return figures


def counts_of(run: Run) -> dict[str, float]:
    if run.attachment is None:
        return {}
    stats = run.attachment.stats()
    return {**{name: getattr(stats, name) for name in COUNTED}, "leased": stats.peak_host_bytes}


def allocated() -> int:
    return torch.cuda.memory_allocated() if ON_GPU else 0


def pinned_by(run: Run) -> int:
    """Page-locked memory of ours, or of whoever pins through torch."""
    return pinned_bytes() if run.attachment is None else ds_fgoffload.host_pool().stats().pinned_bytes


def number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:{form}}"


def show(figures: Mapping[str, Any], console: Console) -> None:
    """Three tables: the turns, plans against what came, plans that were loaded."""
    table = Table(title=f"{figures['arguments']['model']}, {figures['parameters'] / 1e9:.1f}B parameters")
    for name in ("", "part", "steps", "total, s", "added", "against again", "reserved", "freed", "of fixed", "alloc."):
        table.add_column(name, justify="left" if name in {"", "part"} else "right", no_wrap=True)
    for name in ("pinned", "stalled, ms", "late"):
        table.add_column(name, justify="right", no_wrap=True)
    plans = Table(title="Foreseen against measured: errors")
    for name in ("", "tokens", "steps", "saved", "copied", "freed", "peak", "peak without", "time, of a step"):
        plans.add_column(name, justify="right" if name else "left", no_wrap=True)
    for key, row in figures["turns"].items():
        for name in ("first", "after"):
            if not row.get(name):
                continue
            of = row[name]
            table.add_row(
                key,
                name,
                str(of["steps"]),
                f"{of['total_s']:.2f}",
                number(of.get("added_time"), "+.1%"),
                number(of.get("against_again"), "+.1%"),
                f"{of['max_reserved_gib']:.2f}",
                number(of.get("freed_reserved_gib"), ".2f"),
                number(of.get("freed_of_fixed"), ".0%"),
                f"{of['max_allocated_gib']:.2f}",
                f"{of['pinned_gib']:.1f}",
                number(of.get("stalled_ms"), ".1f"),
                number(of.get("late_reloads"), ".0f"),
            )
        for found in row.get("predicted", ()):
            errors = ("saved_bytes", "copied_bytes", "freed_bytes", "peak_bytes", "peak_without_bytes")
            plans.add_row(
                key,
                str(found["tokens"][0]),
                str(found["steps"]),
                *(number(found.get(f"{name}_error"), "+.1%") for name in errors),
                number(found.get("added_time_error"), "+.2%"),
            )
    console.print(table)
    if plans.row_count:
        console.print(plans)
    for key, row in figures["turns"].items():
        if row.get("loaded"):
            console.print(key, row["loaded"])
    for key, check in figures["checks"].items():
        equal = {name: check.get(f"{name}_equal") for name in ("losses", "gradient_sums")}
        console.print(f"{key}: equal {equal}, {check['offloaded_bytes'] / GIB:.2f} GiB offloaded")
    console.print("failed", figures["failed"])
    console.print("not run", figures["not_run"])


def main(given: list[str] | None = None) -> dict[str, Any]:
    arguments = parse(given)
    changing = Changing(arguments)
    changing.run_all()
    changing.save()
    figures = changing.figures()
    show(figures, Console(width=170))
    return figures


if __name__ == "__main__":
    main()
