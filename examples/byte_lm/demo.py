"""Train the byte model twice, without and with offloading, and compare every bit: what ``make demo`` runs."""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "byte_lm" / "train.py"
SECTION = "fine_grained_offload"
SETUP_NOTE = (
    "Each start is silent for some seconds; the first on a machine also compiles DeepSpeed's communication op for CPU "
    "(about 40 seconds, without output)."
)

console = Console()


class DemoError(RuntimeError):
    """The demo cannot show what it is there to show."""


@dataclass(frozen=True)
class Hardware:
    """Where the demo runs, and the sizes that suit it."""

    ranks: int
    config: Path
    training_options: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]

    @classmethod
    def found(cls) -> "Hardware":
        """One or two GPUs if torch sees any, else two processes on the CPU."""
        configs = ROOT / "ds_configs"
        if torch.cuda.is_available():
            sizes = ("--width", "1024", "--seq", "2048")
            return cls(min(2, torch.cuda.device_count()), configs / "zero2.json", sizes, ())
        threads = max(1, (os.cpu_count() or 2) // 2)
        sizes = ("--seq", "128", "--threads", str(min(threads, 4)))
        return cls(2, configs / "cpu_zero2.json", sizes, (("DS_ACCELERATOR", "cpu"),))

    @property
    def description(self) -> str:
        """The hardware in words."""
        return f"{self.ranks} GPU rank(s)" if not self.environment else f"{self.ranks} CPU ranks"


@dataclass(frozen=True)
class Run:
    """What one training run left behind."""

    result: dict[str, Any]
    seconds: float

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        losses: list[float] = self.result["losses"]
        return losses


def free_port() -> int:
    """A port that nothing listens on, so that two demos can run beside each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(title: str, hardware: Hardware, config: Path, steps: int, out: Path, *, runner: tuple[str, ...] = ()) -> Run:
    """Train through DeepSpeed's launcher; the output of the ranks goes straight to the terminal."""
    console.rule(title)
    result = out / "result.json"
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(hardware.ranks)),
        *("--master_port", str(free_port()), *runner, str(SCRIPT)),
        *("--deepspeed_config", str(config), "--steps", str(steps), "--losses-json", str(result), "--deterministic"),
        *hardware.training_options,
    ]
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}
    environment = (
        quiet | dict(hardware.environment) | dict(os.environ) | {"DS_FGOFFLOAD_STATS_JSON": str(out / "stats.json")}
    )
    for stale in out.glob("*.json"):
        stale.unlink()
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    finished = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if finished.returncode != 0:
        raise DemoError(
            f"the run {title!r} ended with exit code {finished.returncode}; what went wrong stands above. "
            f"To repeat it alone: {shlex.join(command)}"
        )
    return Run(json.loads(result.read_text()), time.perf_counter() - started)


def without_section(config: Path, to: Path) -> Path:
    """A copy of a DeepSpeed configuration that says nothing of offloading."""
    settings = json.loads(config.read_text())
    if settings.pop(SECTION, None) is None:
        raise DemoError(f"{config} has no {SECTION!r} section, so there is nothing to compare; add one")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(settings, indent=2))
    return to


def read_statistics(path: Path, ranks: int) -> list[dict[str, int]]:
    """The offloader's counters of each rank; an empty or idle offloader is an error, since it would prove nothing."""
    if not path.exists():
        raise DemoError(
            f"the run with offloading left no {path.name}, so nothing shows that it offloaded; "
            "expected ds_fgoffload.run to write it because DS_FGOFFLOAD_STATS_JSON is set"
        )
    statistics: list[dict[str, int]] = json.loads(path.read_text())
    idle = [rank for rank, counters in enumerate(statistics) if not counters["offloaded_bytes"]]
    if idle or len(statistics) != ranks:
        raise DemoError(
            f"got statistics of {len(statistics)} ranks, of which {idle or 'none'} offloaded nothing; expected {ranks} "
            f"ranks that all do. Look at {SECTION}.modules and min_tensor_bytes in the configuration"
        )
    return statistics


def differences(plain: Run, offloaded: Run) -> list[str]:
    """What differs between two runs, in words; nothing if every bit is the same."""
    found = []
    for step, (a, b) in enumerate(
        zip(plain.result["losses_hex"], offloaded.result["losses_hex"], strict=True), start=1
    ):
        if a != b:
            found.append(f"the losses part at step {step}: {a} without offloading, {b} with it")
            break
    if plain.result["weights_sha256"] != offloaded.result["weights_sha256"]:
        found.append("the final weights have different checksums")
    return found


def mebibytes(count: float) -> str:
    """A number of bytes for reading."""
    return f"{count / 2**20:,.1f} MiB"


def summary(plain: Run, offloaded: Run, statistics: list[dict[str, int]]) -> Table:
    """The two runs beside each other; bytes are sums over the ranks."""

    def total(counter: str) -> int:
        return sum(counters[counter] for counters in statistics)

    steps = len(plain.losses)
    table = Table(title=f"{steps} steps, {len(statistics)} rank(s)")
    table.add_column("")
    table.add_column("without offloading", justify="right")
    table.add_column("with offloading", justify="right")
    table.add_row("first loss", *(f"{run.losses[0]:.6f}" for run in (plain, offloaded)))
    table.add_row("last loss", *(f"{run.losses[-1]:.6f}" for run in (plain, offloaded)))
    table.add_row("weights (SHA-256)", *(run.result["weights_sha256"][:12] for run in (plain, offloaded)))
    table.add_row("to the host, per step", "-", mebibytes(total("offloaded_bytes") / steps))
    table.add_row("back, per step", "-", mebibytes(total("reloaded_bytes") / steps))
    table.add_row("used in place, per step", "-", mebibytes(total("used_in_place_bytes") / steps))
    table.add_row("kept on the device, per step", "-", mebibytes(total("kept_bytes") / steps))
    table.add_row("late reloads", "-", str(total("late_reloads")))
    table.add_row("peak host memory lent", "-", mebibytes(total("pool_peak_leased_bytes")))
    if plain.result["max_reserved_bytes"] is not None:
        reserved = (mebibytes(run.result["max_reserved_bytes"]) for run in (plain, offloaded))
        table.add_row("peak device memory (rank 0)", *reserved)
    table.add_row("training", *(f"{run.result['seconds']:.1f} s" for run in (plain, offloaded)))
    table.add_row("with start-up", *(f"{run.seconds:.1f} s" for run in (plain, offloaded)))
    return table


def demonstrate(steps: int, out: Path) -> None:
    """Run both, compare, and print what came out."""
    hardware = Hardware.found()
    console.print(f"A byte-level transformer learns Python's standard library on {hardware.description}, twice.")
    if hardware.environment:
        console.print(SETUP_NOTE)
    plain_config = without_section(hardware.config, out / "ds_config_plain.json")
    plain = launch("1 of 2: without offloading", hardware, plain_config, steps, out / "plain")
    offloaded = launch(
        "2 of 2: with offloading, the script unchanged",
        hardware,
        hardware.config,
        steps,
        out / "offloaded",
        runner=("--module", "ds_fgoffload.run"),
    )
    console.rule("result")
    console.print(summary(plain, offloaded, read_statistics(out / "offloaded" / "stats.json", hardware.ranks)))
    if found := differences(plain, offloaded):
        raise DemoError(f"offloading changed the training: {'; '.join(found)}. This is a bug, please report it")
    if not plain.losses[-1] < plain.losses[0]:
        raise DemoError(
            f"the loss did not fall: {plain.losses[0]} at first, {plain.losses[-1]} at last; try more steps"
        )
    console.print(f"[green]Every loss of {steps} steps and every bit of the weights are the same.[/green]")


def main() -> int:
    """The command line of the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo", help="folder for what the runs write")
    arguments = parser.parse_args()
    try:
        demonstrate(arguments.steps, arguments.out.resolve())
    except DemoError as error:
        Console(stderr=True).print(f"demo failed: {error}", style="red", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
