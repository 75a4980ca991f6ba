"""Memory and time of a large stack with its activations on the host: ours beside everyone else's, in one process.

``python -m benchmarks.on_time --seconds 420`` measures the DeepSeek-V3-shaped stack, ``--reads also`` a second time
with a blocking read in every router, ``--model llama8b`` a dense stack. ``--modes`` takes names or globs of those in
``benchmarks.settings``; ``--setting 'name={"max_overhead": 0.02}'`` adds a mode of ours. ``--steps 200`` runs many
steps instead of rounds and tells the peak of every 20. A mode that fails is recorded with its error. The file of
results is written after every mode.

Protocol: a mode is opened and warmed up (ours learns meanwhile), the allocator's cache is emptied once, one more step,
the peaks are reset, then steps are timed on the device. Every round goes through all modes. In the first, each
mode then runs a step with deterministic kernels, whose loss and gradients are compared with those of plain training.
Last, a copy of the model is trained plainly in turn with it, step by step: what the mode adds to the time is the median
of the differences.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from deepspeed.accelerator import get_accelerator

import ds_fgoffload
from benchmarks import deepseek, modes, settings
from benchmarks.decoder import Decoder, DecoderShape
from benchmarks.measure import (
    GIB,
    ON_GPU,
    BytesToHost,
    Pairs,
    Stalls,
    Steps,
    deterministic,
    gradient_sums,
    pinned_bytes,
    run_steps,
    save,
    settle,
    summary,
    time_pairs,
    time_steps,
    timed,
)
from ds_fgoffload.device.pinning import unpin_unused_host

FindOut: TypeAlias = Callable[[modes.Run, dict[str, Any]], None]
READS = {"no": (False,), "only": (True,), "also": (False, True)}
STEPS_PER_PEAK = 20
SHOWN = (
    *("step_ms_median", "step_ms_min", "step_ms_max", "added_time", "added_time_mean", "added_time_error"),
    *("max_reserved_gib", "freed_reserved_gib"),
    *("max_allocated_gib", "freed_allocated_gib", "moved_gib", "stalled_ms", "stalled_share", "pinned_gib"),
)
TOLD = (
    *("per_step", "losses_equal", "gradients_equal", "find_pinned failed", "find_moved failed"),
    *("find_gradients failed", "max_reserved_gib_per_20_steps", "counts", "planned_gib"),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(settings.SELECTED), default="deepseek")
    parser.add_argument("--modes", nargs="+", default=[], help="names or globs; default: all but the slowest")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=JSON", help="one more section of ours")
    parser.add_argument("--reads", choices=sorted(READS), default="no", help="a blocking read in every router")
    parser.add_argument("--seconds", type=float, default=420, help="ends before this, the imports not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of a mode in a round")
    parser.add_argument(
        "--pairs", type=int, default=20, help="steps that a copy of the model runs in turn with; 0: none"
    )
    parser.add_argument("--warmup", type=int, help="steps before those; default: what the mode asks for")
    parser.add_argument("--steps", type=int, default=0, help="run so many steps of each mode, in one round")
    parser.add_argument("--layers", type=int, help="default: 8 of deepseek, 32 of llama8b")
    parser.add_argument("--length", type=int, default=4096, help="tokens")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself")
    parser.add_argument("--name", help="of the file under results")
    chosen = parser.parse_args(arguments)
    chosen.name = chosen.name or "_".join(["on_time", chosen.model, *(["steps"] if chosen.steps else [])])
    return chosen


def build(arguments: argparse.Namespace) -> modes.Job:
    """The model in bf16 with its gradients allocated, and a batch of one; each time the same."""
    shape: Any
    make: Any
    if arguments.model == "deepseek":
        shape, make = deepseek.TINY if arguments.tiny else deepseek.DeepSeekShape(), deepseek.DeepSeek
    elif arguments.tiny:
        shape, make = DecoderShape(64, 128, 2, 4, 2, 128), Decoder
    else:
        shape, make = DecoderShape(4096, 14336, 32, 32, 8), Decoder
    if arguments.layers:
        shape = type(shape)(**{**vars(shape), "layers": arguments.layers})
    device = get_accelerator().device_name()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = make(shape)
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    length = 64 if arguments.tiny else arguments.length
    tokens = torch.randint(0, shape.vocabulary, (1, length), device=device)
    return modes.Job(arguments.model, model, tokens, settings.SELECTED[arguments.model], arguments.tiny)


class Comparison:
    """Runs modes on one job and keeps what was measured, by the mode's key: its name, and whether routers read."""

    def __init__(self, job: modes.Job, arguments: argparse.Namespace, chosen: list[modes.Mode]) -> None:
        self.job = job
        self.chosen = chosen
        self.arguments = arguments
        self.until_s = time.monotonic() + arguments.seconds
        self.rounds: dict[str, list[Steps]] = {}
        self.pairs: dict[str, Pairs] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.not_run: dict[str, str] = {}
        self.longest_s: dict[str, float] = {}

    def run_all(self) -> None:
        """All rounds, as far as the time goes."""
        for round_ in range(1 if self.arguments.steps else self.arguments.rounds):
            for reads in READS[self.arguments.reads]:
                # each second round the other way round, so that what changes with time falls on all alike
                for mode in self.chosen if round_ % 2 == 0 else reversed(self.chosen):
                    self._run_if_possible(mode, reads, round_)

    def _run_if_possible(self, mode: modes.Mode, reads: bool, round_: int) -> None:
        key = key_of(mode, reads)
        if key in self.failed:
            return
        if mode.needs_gpu and not ON_GPU:
            self.not_run[key] = "needs a GPU"
            return
        # the first time, as long as the longest yet
        expected_s = self.longest_s.get(key, max(self.longest_s.values(), default=0.0))
        if time.monotonic() + expected_s > self.until_s:
            self.not_run[key] = f"no time left for round {round_ + 1}"
            return
        start_s = time.monotonic()
        try:
            self._run(mode, key, reads, first=round_ == 0)
        except Exception as error:  # noqa: BLE001 - whatever becomes of one mode, the others are measured
            self.failed[key] = f"{type(error).__name__}: {str(error)[:500]}"
            print(key, "FAILED", self.failed[key], flush=True)
        self._clean()
        took_s = time.monotonic() - start_s
        self.longest_s[key] = max(took_s, self.longest_s.get(key, 0.0))
        if self.rounds.get(key):
            last = self.rounds[key][-1]
            shown = " ".join(f"{ms:.1f}" for ms in last.step_ms[:8])
            print(
                f"{round_ + 1} {key}: {shown} ms, reserved {last.max_reserved_bytes / GIB:.2f} GiB, {took_s:.0f} s",
                flush=True,
            )
        save(self.arguments.name, self.figures())

    def _run(self, mode: modes.Mode, key: str, reads: bool, *, first: bool) -> None:
        read_counts_of(self.job, reads)
        warmup = mode.warmup if self.arguments.warmup is None else self.arguments.warmup
        with mode.open(self.job) as run:
            if self.arguments.steps:
                facts = self._run_many(run, warmup)
                self.facts[key] = facts
                return
            steps = run_steps(run.step, warmup=warmup, repeats=self.arguments.repeats, until_s=self.until_s)
            self.rounds.setdefault(key, []).append(steps)
            if first:
                self.facts[key] = self._facts(run)
            if self.arguments.pairs:
                self._run_pairs(run, key, reads)

    def _run_pairs(self, run: modes.Run, key: str, reads: bool) -> None:
        """The copy exists for these steps alone: memory has been judged without it."""
        beside = build(self.arguments)
        read_counts_of(beside, reads)
        beside.step()
        pairs = time_pairs(run.step, beside.step, self.arguments.pairs, self.until_s)
        self.pairs[key] = self.pairs.get(key, Pairs([], [])) + pairs

    def _facts(self, run: modes.Run) -> dict[str, Any]:
        """What steps that are not timed can tell. What cannot be found out is told, too; what was measured stands."""
        facts: dict[str, Any] = {}
        for find_out in (find_pinned, find_moved, self._find_gradients):
            self._find_if_possible(find_out, run, facts)
        return {**facts, **run.facts}

    def _find_if_possible(self, find_out: FindOut, run: modes.Run, facts: dict[str, Any]) -> None:
        try:
            find_out(run, facts)
        except Exception as error:  # noqa: BLE001 - as above
            facts[f"{find_out.__name__.strip('_')} failed"] = f"{type(error).__name__}: {str(error)[:500]}"

    def _find_gradients(self, run: modes.Run, facts: dict[str, Any]) -> None:
        with deterministic():
            facts["deterministic_loss"] = float(run.step())
        facts["gradient_sums"] = gradient_sums(self.job.model)

    def _run_many(self, run: modes.Run, warmup: int) -> dict[str, Any]:
        """Peak and times of every 20 steps."""
        for _ in range(warmup):
            run.step()
        settle()
        run.step()
        before = counts(run)
        parts: list[Steps] = []
        with stalls(run.attachment) as measured:
            done = 0
            while done < self.arguments.steps and time.monotonic() < self.until_s:
                size = min(STEPS_PER_PEAK, self.arguments.steps - done)
                parts.append(time_steps(run.step, size))
                done += size
        times = [ms for part in parts for ms in part.step_ms]
        facts: dict[str, Any] = {
            **summary(parts),
            "steps": done,
            "max_reserved_gib_per_20_steps": [part.max_reserved_bytes / GIB for part in parts],
            "max_allocated_gib_per_20_steps": [part.max_allocated_bytes / GIB for part in parts],
        }
        find_pinned(run, facts)
        if run.attachment is not None:
            facts["counts"] = difference(before, counts(run))
        if measured is not None:
            facts["stalled_ms"] = measured.milliseconds()
            facts["stalled_share"] = facts["stalled_ms"] / sum(times)
        return facts

    def _clean(self) -> None:
        gc.collect()
        settle()
        with contextlib.suppress(Exception):
            unpin_unused_host()

    def figures(self) -> dict[str, Any]:
        """Everything so far."""
        rows: dict[str, dict[str, Any]] = {}
        for key in [*self.rounds, *(key for key in self.facts if key not in self.rounds)]:
            rows[key] = {**(summary(self.rounds[key]) if key in self.rounds else {}), **self.facts.get(key, {})}
        for key, row in rows.items():
            plain = rows.get("plain, reads" if key.endswith(", reads") else "plain")
            if plain is not None and "max_reserved_gib" in row and "max_reserved_gib" in plain:
                row["freed_reserved_gib"] = plain["max_reserved_gib"] - row["max_reserved_gib"]
                row["freed_allocated_gib"] = plain["max_allocated_gib"] - row["max_allocated_gib"]
                if key in self.pairs:
                    row.update(self.pairs[key].summary())
                else:
                    row["added_time"] = row["step_ms_median"] / plain["step_ms_median"] - 1
                row["losses_equal"] = set(row["losses"]) == set(plain["losses"])
                if "gradient_sums" in row and "gradient_sums" in plain:
                    row["gradients_equal"] = row["gradient_sums"] == plain["gradient_sums"]
        return {
            "arguments": vars(self.arguments),
            "parameters": sum(p.numel() for p in self.job.model.parameters()),
            "selected": list(self.job.selected),
            "saved_mib_of_a_layer_by_hand": self._saved_by_hand(),
            "parameters_and_gradients_gib": self._static_bytes() / GIB,
            "activations_gib": self._activations_gib(rows),
            "modes": rows,
            "labels": {name: mode.label for name, mode in settings.table().items()},
            "sections": {mode.name: mode.section for mode in self.chosen if mode.section is not None},
            "failed": self.failed,
            "not_run": {key: why for key, why in self.not_run.items() if key not in self.failed},
        }

    def _saved_by_hand(self) -> dict[str, float] | None:
        shape = self.job.model.shape
        return deepseek.saved_mib(shape, self.job.tokens.numel()) if isinstance(shape, deepseek.DeepSeekShape) else None

    def _static_bytes(self) -> int:
        return sum(2 * p.numel() * p.element_size() for p in self.job.model.parameters())

    def _activations_gib(self, rows: Mapping[str, Mapping[str, Any]]) -> float | None:
        """What plain training has on the device at its peak beside parameters and gradients."""
        peak_gib = rows.get("plain", {}).get("max_allocated_gib")
        return None if peak_gib is None else peak_gib - self._static_bytes() / GIB


def read_counts_of(job: modes.Job, reads: bool) -> None:
    """Whether the routers read, if the model has any."""
    read_counts = getattr(job.model, "read_counts", None)
    if read_counts is not None:
        read_counts(reads)


def key_of(mode: modes.Mode, reads: bool) -> str:
    return f"{mode.name}, reads" if reads else mode.name


def find_pinned(run: modes.Run, facts: dict[str, Any]) -> None:
    """Page-locked memory of ours, or of whoever pins through torch."""
    pinned = pinned_bytes() if run.attachment is None else ds_fgoffload.host_pool().stats().pinned_bytes
    facts["pinned_gib"] = pinned / GIB


def find_moved(run: modes.Run, facts: dict[str, Any]) -> None:
    """What a step moves to the host, and for ours all that it counts and how long compute waits for copies."""
    if run.attachment is None:
        with BytesToHost() as copied:
            run.step()
        facts["moved_gib"] = copied.total / GIB
        return
    before = counts(run)
    with stalls(run.attachment) as measured:
        milliseconds, _ = timed(run.step)
    facts["per_step"] = difference(before, counts(run))
    facts["moved_gib"] = facts["per_step"]["offloaded_bytes"] / GIB
    if measured is not None:
        facts["stalled_ms"] = measured.milliseconds()
        facts["step_ms_while_stalls_are_timed"] = milliseconds


def counts(run: modes.Run) -> dict[str, float]:
    """Every number that ours has counted so far."""
    if run.attachment is None:
        return {}
    return {key: value for key, value in vars(run.attachment.stats()).items() if isinstance(value, int | float)}


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {key: value - before.get(key, 0) for key, value in after.items()}


@contextlib.contextmanager
def stalls(attachment: ds_fgoffload.Attachment | None) -> Iterator[Stalls | None]:
    """Times the waits of compute, where there are any to time."""
    if attachment is None or not ON_GPU:
        yield None
        return
    with Stalls(attachment) as measured:
        yield measured


def choose(arguments: argparse.Namespace) -> list[modes.Mode]:
    """The modes to run, in the table's order; plain training always where all else is compared with it."""
    only_if_asked_for = settings.RECOMPUTED[arguments.model]
    sections = {**settings.OURS, **only_if_asked_for}
    for setting in arguments.setting:
        name, _, section = setting.partition("=")
        sections[name] = json.loads(section)
    available = settings.table(sections)
    if not arguments.modes:
        return [mode for name, mode in available.items() if name not in {*settings.OPTIONAL, *only_if_asked_for}]
    patterns = [*arguments.modes, *([] if arguments.steps else ["plain"])]
    wanted = {name for pattern in patterns for name in available if fnmatch.fnmatchcase(name, pattern)}
    unknown = [p for p in arguments.modes if not any(fnmatch.fnmatchcase(name, p) for name in available)]
    if unknown:
        raise SystemExit(f"--modes: {unknown} match no mode; there are {list(available)}")
    return [mode for name, mode in available.items() if name in wanted]


def main(given: list[str] | None = None) -> dict[str, Any]:
    arguments = parse(given)
    chosen = choose(arguments)
    comparison = Comparison(build(arguments), arguments, chosen)
    comparison.run_all()
    figures = comparison.figures()
    save(arguments.name, figures)
    for key, row in figures["modes"].items():
        print(f"{key}:", ", ".join(f"{name} {row[name]:.3f}" for name in SHOWN if row.get(name) is not None))
        print("   ", {name: row[name] for name in TOLD if name in row})
    print("failed", figures["failed"])
    print("not run", figures["not_run"])
    return figures


if __name__ == "__main__":
    main()
