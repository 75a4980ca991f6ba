"""Puts the figures of benchmarks/results into the README and docs/benchmarks.md, between their markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOT = "docs/on_time.svg"
GIB = 2**30
BEGIN, END = "<!-- results", "<!-- /results -->"


def load(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
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


def moved_and_stalled(mode: dict[str, Any], moved_bytes: int | None) -> tuple[str, str]:
    """GiB and ms; a dash for what the mode does not tell."""
    moved = "-" if moved_bytes is None else f"{moved_bytes / GIB:.1f}"
    return moved, f"{mode['stalled_ms']:.1f}" if "stalled_ms" in mode else "-"


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


def added(mode: dict[str, Any]) -> str:
    """To the time of a step: the median, and where it was measured in pairs, the mean and its standard error."""
    mean = f" ({mode['added_time_mean']:+.1%} ± {mode['added_time_error']:.1%})" if "added_time_mean" in mode else ""
    return f"{mode['added_time']:+.1%}{mean}"


STACKS = {
    "deepseek": "DeepSeek-V3-shaped stack (hidden 7168, latent attention, 16 local experts, top-8)",
    "llama8b": "Dense Llama-8B-shaped stack (hidden 4096, intermediate 14336)",
}


def on_time(figures: dict[str, Any], *, reads: bool = False) -> list[str]:
    """Ours beside everyone else, in one process."""
    arguments = figures["arguments"]
    modes = {name: mode for name, mode in figures["modes"].items() if name.endswith(READS) == reads}
    failed = {
        name: why
        for name, why in figures["failed"].items()
        if name.endswith(READS) == reads and name not in modes  # a mode that failed in a later round has figures
    }
    with_reads = ", a blocking read in every router" if reads else ""
    allocator = "" if figures["allocator"] == "default" else f", allocator `{figures['allocator']}`"
    activations_gib = figures["activations_gib"]
    peak = f" Activations at the peak of plain training: {activations_gib:.1f} GiB." if activations_gib else ""
    return [
        f"**{STACKS[arguments['model']]}**, {figures['parameters'] / 1e9:.1f}B parameters, bf16, {arguments['length']} tokens, forward and backward, one {figures['device']}{with_reads}{allocator}.{peak} Offloaded: `{json.dumps(figures['selected'])}`.",
        "",
        "| | max reserved, GiB | freed, GiB | step, median (min to max) | added: median (mean ± its error) | moved, GiB | stalled, ms | late reloads | pinned, GiB | losses, gradients equal |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_on_time_row(title(figures, name), mode) for name, mode in modes.items()),
        *(f"| {title(figures, name)} | failed: {why.split(':')[0]} | | | | | | | | |" for name, why in failed.items()),
    ]


READS = ", reads"


def title(figures: dict[str, Any], key: str) -> str:
    """What a mode is called in a table: ours with its section, others with their label."""
    name = key.removesuffix(READS)
    section = figures["sections"].get(name)
    return f"{name}: `{json.dumps(section)}`" if section is not None else figures["labels"].get(name, name)


def _on_time_row(name: str, mode: dict[str, Any]) -> str:
    def number(key: str, digits: int = 1) -> str:
        return f"{mode[key]:.{digits}f}" if mode.get(key) is not None else "-"

    late = mode.get("per_step", {}).get("late_reloads")
    equal = ", ".join("yes" if mode[key] else "NO" for key in ("losses_equal", "gradients_equal") if key in mode)
    cells = (
        name,
        number("max_reserved_gib"),
        number("freed_reserved_gib"),
        spread(mode),
        added(mode),
        number("moved_gib"),
        number("stalled_ms"),
        "-" if late is None else f"{late:.0f}",
        number("pinned_gib"),
        equal,
    )
    return f"| {' | '.join(cells)} |"


def steps(figures: dict[str, Any]) -> list[str]:
    """Many steps in a row: the peak stays where it is."""
    lines = [
        f"**Many steps.** {STACKS[figures['arguments']['model']]}; max reserved of every 20 steps:",
        "",
        "| | steps | max reserved, GiB, least to most of them | late reloads | stalled |",
        "|---|---|---|---|---|",
    ]
    for name, mode in figures["modes"].items():
        reserved = mode["max_reserved_gib_per_20_steps"]
        late = mode.get("counts", {}).get("late_reloads")
        stalled = mode.get("stalled_share")
        lines.append(
            f"| {title(figures, name)} | {mode['steps']} | {min(reserved):.2f} to {max(reserved):.2f} | "
            f"{'-' if late is None else f'{late:.0f}'} | {'-' if stalled is None else f'{stalled:.2%}'} |"
        )
    return lines


def changing_steps(figures: dict[str, Any]) -> list[str]:
    """Lengths that change from step to step, and what was foreseen."""
    arguments, turns = figures["arguments"], figures["turns"]
    config = figures["config"]
    experts = f", {config['num_local_experts']} experts by `{figures['experts']}`" if figures["experts"] else ""
    learn, longest = arguments["learn"], arguments["length"]
    lines = [
        f"**Transformers' {arguments['model'].replace('qwen3', 'Qwen3').replace('_moe', '-MoE')}** "
        f"({config['num_hidden_layers']} layers, hidden {config['hidden_size']}{experts}, "
        f"{figures['parameters'] / 1e9:.1f}B parameters), bf16, one sequence a step, AdamW, one {figures['device']}. "
        f"Lengths: always {longest} (fixed), {longest // 4}, {longest // 2} or {longest} (buckets), anything from {longest // 4} to {longest} (uniform). "
        f"`modules: {json.dumps(figures['selected'])}`. The first {learn} steps, in which ours learns, and the {arguments['steps']} after them:",
        "",
        "| lengths | | first: max reserved, GiB | first: time | after: max reserved, GiB | freed, GiB | of what is freed at a fixed length | after: time | against plain training again | stalled, ms a step | pinned, GiB | losses, gradients equal |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_changing_row(figures, key) for key in turns if key.count(", ") == 1),
        *(f"| {key} | failed: {why.split(':')[0]} | | | | | | | | | | |" for key, why in figures["failed"].items()),
    ]
    errors = ("saved_bytes", "copied_bytes", "freed_bytes", "peak_bytes", "peak_without_bytes")
    foreseen = [
        f"| {key} | {found['tokens'][0]} | {found['steps']} | "
        + " | ".join(_or_dash(found.get(f"{name}_error"), "+.1%") for name in errors)
        + f" | {_or_dash(found.get('planned_added_time'), '+.2%')} | {_or_dash(found.get('measured_added_time'), '+.2%')} |"
        for key, row in turns.items()
        for found in row.get("predicted", ())
    ]
    if foreseen:
        lines += [
            "",
            "What plans foresaw, less what was measured, as a part of that; and the time that is added to a step:",
            "",
            "| | tokens | steps | saved | copied | freed | peak | peak without | foreseen | measured |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *foreseen,
        ]
    loaded = [_loaded_row(key, row["loaded"]) for key, row in turns.items() if row.get("loaded")]
    if loaded:
        lines += [
            "",
            "A run that loaded its plan: its second step, and in the run that wrote the plan the step with the same tokens:",
            "",
            "| | max reserved, GiB | max allocated, GiB | step, ms | pinned, GiB | most pinned over most leased |",
            "|---|---|---|---|---|---|",
            *loaded,
        ]
    return lines


def _changing_row(figures: dict[str, Any], key: str) -> str:
    row = figures["turns"][key]
    kind, mode = key.split(", ")
    first, after = row.get("first", {}), row.get("after", {})
    check = figures["checks"].get(f"{key}, check", {})
    equal = ", ".join(
        "yes" if check[name] else "NO" for name in ("losses_equal", "gradient_sums_equal") if name in check
    )
    stalled_ms = after["stalled_ms"] / after["steps"] if after.get("stalled_ms") is not None else None
    plain_ = mode == "plain"
    cells = (
        kind,
        title(figures, mode),
        _or_dash(first.get("max_reserved_gib"), ".1f"),
        _time_cell(first),
        _or_dash(after.get("max_reserved_gib"), ".1f"),
        "-" if plain_ else _or_dash(after.get("freed_reserved_gib"), ".1f"),
        "-" if plain_ else _or_dash(after.get("freed_of_fixed"), ".0%"),
        _time_cell(after),
        _or_dash(after.get("against_again"), "+.1%"),
        _or_dash(stalled_ms, ".1f"),
        _or_dash(max(first.get("pinned_gib", 0.0), after.get("pinned_gib", 0.0)), ".1f"),
        equal or "-",
    )
    return f"| {' | '.join(cells)} |"


def _time_cell(part: dict[str, Any]) -> str:
    if not part:
        return "-"
    return f"{part['steps']} steps in {part['total_s']:.1f} s ({_or_dash(part.get('added_time'), '+.1%')})"


def _loaded_row(key: str, loaded: dict[str, Any]) -> str:
    cells = [
        f"{loaded[name]['second_step']:.{digits}f} ({loaded[name]['first_run']:.{digits}f})"
        for name, digits in (("peak_reserved", 1), ("peak_allocated", 1), ("ms", 0), ("pinned", 1))
    ]
    step = f"{key.removesuffix(', plan')}, step {loaded['first_runs_step']} of the first run"
    return f"| {step} | {' | '.join(cells)} | {_or_dash(loaded['pinned_over_leased'], '.2f')} |"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


CASES = {"zero1": "ZeRO-1", "zero3": "ZeRO-3", "pipeline": "Pipeline of two stages, ZeRO-1"}


def two_gpus(figures: dict[str, Any]) -> list[str]:
    """Each rank of a DeepSpeed engine."""
    arguments = figures["arguments"]
    batches = f"{arguments['micro_batches']} micro-batches of " if arguments["case"] == "pipeline" else ""
    lines = [
        f"**{CASES[arguments['case']]}** on two {figures['device']}, {arguments['model']} layers, {batches}{arguments['length']} tokens:",
        "",
        "| rank | | max reserved, GiB | freed | step, median (min to max) | added | moved, GiB | stalled, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rank, modes in enumerate(figures["ranks"]):
        for name, mode in modes.items():
            moved, stalled = moved_and_stalled(mode, mode.get("per_step", {}).get("offloaded_bytes"))
            lines.append(
                f"| {rank} | {name} | {mode['max_reserved_gib']:.1f} | {mode['freed_share'] or 0:.1%} | {spread(mode)} | {added(mode)} | {moved} | {stalled} |"
            )
    equal = all(mode["losses_equal"] for modes in figures["ranks"] for mode in modes.values())
    return [*lines, "", f"Losses are equal: {'yes' if equal else 'NO'}."]


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


def is_there(name: str) -> bool:
    return (RESULTS / f"{name}.json").is_file()


def in_short() -> list[str]:
    """A line for each question, where it was answered: GiB or share of max reserved, and time."""
    lines = []
    if is_there("on_time_2gpu_pipeline"):
        ranks = load("on_time_2gpu_pipeline")["ranks"]
        name = next(name for name in ranks[0] if name != "plain")
        before, after = (max(modes[key]["max_reserved_gib"] for modes in ranks) for key in ("plain", name))
        lines.append(
            f"- two pipeline stages, the fuller of them: max reserved {after / before - 1:+.1%}, "
            f"step {ranks[0][name]['added_time']:+.1%}"
        )
    for title_, name, keys in (
        ("DeepSeek-V3-shaped stack", "on_time_deepseek", ("ours almost free", "ours 4 GiB", "megatron", "trl")),
        (
            "the same with a blocking read in every router",
            "on_time_deepseek_reads",
            (f"ours almost free{READS}", f"megatron{READS}"),
        ),
        (
            "the same in expandable segments",
            "on_time_deepseek_expandable",
            ("ours almost free", "recomputed norms and act, the rest offloaded", "megatron"),
        ),
        (
            "dense stack",
            "on_time_llama8b",
            ("ours almost free", "recomputed norms and act", "recomputed norms and act, the rest offloaded"),
        ),
    ):
        if is_there(name):
            modes = load(name)["modes"]
            lines.append(f"- {title_}: " + "; ".join(_in_short(key, modes[key]) for key in keys if key in modes))
    figures = load("checkpoint_inputs")
    lines.append(
        "- checkpoint inputs: " + "; ".join(_in_short(key, figures[key]) for key in ("ours", "trl", "deepspeed"))
    )
    return lines


def _in_short(key: str, mode: dict[str, Any]) -> str:
    freed = f"{-mode['freed_reserved_gib']:+.1f} GiB, step {mode['added_time']:+.1%}"
    return f"{key.removesuffix(READS)} {freed}"


def readme() -> str:
    """What stands between the markers of the README."""
    parts = [*in_short(), ""]
    if is_there("on_time_deepseek"):
        figures = load("on_time_deepseek")
        parts += [*on_time(figures), "", source(figures), "", f"![memory freed against time added]({PLOT})", ""]
    for name, lines in (
        ("on_time_2gpu_pipeline", two_gpus),
        ("checkpoint_inputs", checkpoint_inputs),
        ("host_time", host_time),
    ):
        figures = load(name)
        parts += [*lines(figures), "", source(figures), ""]
    available = [p.stem for p in sorted(RESULTS.glob("exactness_*.json"))]
    return "\n".join([*parts, *exactness(available), ""])


def more() -> str:
    """What stands between the markers of docs/benchmarks.md: runs that are there, but for those in the README."""
    parts: list[str] = []
    for name in sorted(p.stem for p in RESULTS.glob("on_time_*.json")):
        figures = load(name)
        if name == "on_time_2gpu_pipeline":
            continue
        if "ranks" in figures:
            tables = [two_gpus(figures)]
        elif figures["arguments"]["steps"]:
            tables = [steps(figures)]
        else:
            found = {key.endswith(READS) for key in figures["modes"]}
            tables = [on_time(figures, reads=reads) for reads in (False, True) if reads in found]
            if name == "on_time_deepseek" and False in found:
                tables.pop(0)
        for lines in tables:
            parts += [*lines, "", source(figures), ""]
    for name in sorted(p.stem for p in RESULTS.glob("changing_steps_*.json")):
        figures = load(name)
        parts += [*changing_steps(figures), "", source(figures), ""]
    if is_there("core"):
        figures = load("core")
        parts += [*core(figures), "", source(figures), ""]
    return "".join(f"{line}\n" for line in parts)


def host_pool() -> str:
    """What stands between the markers of docs/host_pool.md."""
    figures = load("host_pool")
    growing = load("host_pool_growth")
    growth, again, copies = growing["growth"], growing["growth_again"], growing["copies"]
    rows = [
        "| trace | through | held, GiB | held / peak leased | taken from the system | after step 60 | hits |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, trace in figures["traces"].items():
        kind, through = name.split(", ")
        rows.append(
            f"| {kind} | {through} | {trace['held_bytes'] / GIB:.2f} | {trace['held_over_peak']:.3f} | "
            f"{trace['allocations']} | {trace['allocations_after_step_60']} | {trace['hits']} |"
        )
    sentence = (
        f"Growth by {growing['arguments']['growth_gib']} GiB: {growth['gib_per_s']:.1f} GiB/s, "
        f"once more {again['gib_per_s']:.1f}, through torch {growth['torch_gib_per_s']:.1f}. Copies out and back, inside a slab: "
        f"{copies['d2h_inside_gb_per_s']:.1f} and {copies['h2d_inside_gb_per_s']:.1f} GB/s; across two: "
        f"{copies['d2h_across_gb_per_s']:.1f} and {copies['h2d_across_gb_per_s']:.1f}."
    )
    drawn = f"{figures['arguments']['steps']} steps, lengths or token counts of experts drawn anew in each, on one {figures['device']}."
    return "\n".join([*rows, "", drawn, "", source(figures), "", sentence, "", source(growing), ""])


PAGES = {"README.md": readme, "docs/benchmarks.md": more, "docs/host_pool.md": host_pool}


def between_markers(page: str) -> str:
    """What a page has between its markers now."""
    return _split((ROOT / page).read_text(encoding="utf-8"))[1]


def _split(text: str) -> tuple[str, str, str]:
    head, rest = text.split(BEGIN, 1)
    marker, rest = rest.split("\n", 1)
    middle, tail = rest.split(END, 1)
    return f"{head}{BEGIN}{marker}\n", middle, f"{END}{tail}"


def main() -> None:
    for page, make in PAGES.items():
        path = ROOT / page
        head, _, tail = _split(path.read_text(encoding="utf-8"))
        path.write_text(head + make() + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
