"""Puts the figures of benchmarks/results into the README, between its markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results", "<!-- /results -->"


def load(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return figures


def core(figures: dict[str, Any]) -> list[str]:
    """Memory and time of the decoder with its MLPs offloaded."""
    plain, offloaded = figures["plain"], figures["offloaded"]
    rates = figures["rates"]

    def row(name: str, mode: dict[str, Any]) -> str:
        return f"| {name} | {mode['max_reserved_gib']:.1f} | {mode['max_allocated_gib']:.1f} | {spread(mode)} |"

    arguments = figures["arguments"]
    return [
        f"**Memory and time.** A 1.1B-parameter decoder (22 layers, hidden 2048) in bf16 under ZeRO-1 on one "
        f"{figures['device']}, {arguments['batch']} x {arguments['length']} tokens, `modules: "
        f"{json.dumps(arguments['modules'])}`:",
        "",
        "| | max reserved, GiB | max allocated, GiB | step, median (min to max) |",
        "|---|---|---|---|",
        row("without", plain),
        row("with", offloaded),
        "",
        f"{figures['moved_gib']:.1f} GiB move per step, {figures['freed_of_moved']:.0%} of them are gone from max reserved. "
        f"The copies run at {rates['d2h']['gb_per_s']:.1f} GB/s out and {rates['h2d']['gb_per_s']:.1f} GB/s back, and the "
        "step is as long as they take: this selection is more than the link can hide, and shows what memory can be had. "
        f"Losses are equal: {'yes' if figures['losses_equal'] else 'NO'}.",
    ]


def host_time(figures: dict[str, Any]) -> list[str]:
    """Host time of a saved tensor beside TRL's."""
    per_call, wall = figures["us_per_hook_call"], figures["wall_ms"]
    saved = figures["hook_calls_per_step"]["ours"] // 2
    return [
        f"**Host time.** Many small tensors ({saved} saves a step), one run beside TRL's `OffloadActivations`, same model:",
        "",
        "| | µs per pack or unpack, median of rounds | step on the host's clock, ms, median (min to max) |",
        "|---|---|---|",
        *(
            f"| {name} | {per_call[key]['median']:.1f} | {wall[key]['median']:.0f} "
            f"({wall[key]['min']:.0f} to {wall[key]['max']:.0f}) |"
            for name, key in (("ds_fgoffload", "ours"), ("TRL", "trl"))
        ),
        f"| no offloading | - | {wall['plain']['median']:.0f} ({wall['plain']['min']:.0f} to {wall['plain']['max']:.0f}) |",
    ]


def pipeline(figures: dict[str, Any]) -> list[str]:
    """Memory and time of each stage."""
    arguments = figures["arguments"]
    names = {"plain": "without", "offloaded": "with", "offloaded_and_buffers": "with, and `release_pipeline_buffers`"}
    lines = [
        f"**Pipeline.** `PipelineEngine` on two {figures['device']}, ZeRO-1, bf16, {arguments['layers']} decoder layers of hidden 4096, {arguments['micro_batches']} micro-batches of {arguments['length']} tokens, `modules: {json.dumps(arguments['modules'])}`:",
        "",
        "| stage | | max reserved, GiB | max allocated, GiB | step, median (min to max) | moved per step, GiB | compute stalled, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, modes in enumerate(figures["stages"]):
        for key, name in names.items():
            mode = modes[key]
            moved = f"{mode['offloaded_bytes'] / 2**30:.1f}" if "offloaded_bytes" in mode else "-"
            stalled = f"{mode['stalled_ms']:.1f}" if "stalled_ms" in mode else "-"
            lines.append(
                f"| {stage} | {name} | {mode['max_reserved_gib']:.1f} | {mode['max_allocated_gib']:.1f} | {spread(mode)} | {moved} | {stalled} |"
            )
    return lines


def checkpoint_inputs(figures: dict[str, Any]) -> list[str]:
    """Inputs of checkpointed layers, beside others who offload them."""
    arguments = figures["arguments"]
    names = {
        "plain": "checkpointing alone",
        "ours": 'ds_fgoffload, `modules: ["model"]`',
        "trl": "TRL `OffloadActivations`",
        "deepspeed": "DeepSpeed `CheckpointHiddenStatesOffload`",
    }
    return [
        f"**Checkpoint inputs.** Hugging Face Qwen3-shaped decoder ({arguments['layers']} layers, hidden 4096, vocabulary {arguments.get('vocabulary', 32000)}), {arguments['length']} tokens, gradient checkpointing, allocator {figures['allocator']}; the inputs are {figures['inputs_gib']:.1f} GiB:",
        "",
        "| | max reserved, GiB | max allocated, GiB | step, median (min to max) |",
        "|---|---|---|---|",
        *(
            f"| {name} | {figures[key]['max_reserved_gib']:.1f} | {figures[key]['max_allocated_gib']:.1f} | {spread(figures[key])} |"
            for key, name in names.items()
        ),
    ]


def spread(mode: dict[str, Any]) -> str:
    return f"{mode['step_ms_median']:.0f} ms ({mode['step_ms_min']:.0f} to {mode['step_ms_max']:.0f})"


def exactness(names: list[str]) -> list[str]:
    """How many combinations were compared."""
    runs = [load(name) for name in names]
    rows = [row for run in runs for rank in run["ranks"] for row in rank]
    unequal = sum(len(run["unequal"]) for run in runs)
    return [
        f"**Exactness on the device.** {len(rows)} comparisons on one and two GPUs (plain, ZeRO 0-3, fp32 and bf16, "
        f"accumulation 1 and 3): {unequal} unequal.",
    ]


def source(figures: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    return f"<sub>`{figures['command']}`, {figures['date'][:10]}, commit {figures['commit'][:8]}, {versions}</sub>"


def main() -> None:
    parts: list[str] = []
    for name, lines in (
        ("core", core),
        ("pipeline", pipeline),
        ("checkpoint_inputs", checkpoint_inputs),
        ("checkpoint_inputs_small_vocabulary", checkpoint_inputs),
        ("host_time", host_time),
    ):
        figures = load(name)
        parts += [*lines(figures), "", source(figures), ""]
    available = [p.stem for p in sorted((ROOT / "benchmarks" / "results").glob("exactness_*.json"))]
    parts += [*exactness(available), ""]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN, 1)
    marker, rest = rest.split("\n", 1)
    _, tail = rest.split(END, 1)
    readme.write_text(f"{head}{BEGIN}{marker}\n" + "\n".join(parts) + f"{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
