"""``make matrix``: runs the suite with the supported pairs of torch and DeepSpeed, and prints a table.

Each pair has an environment of its own in ``build/matrix``, made and removed here; one that is there is used as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.table import Table

from ds_fgoffload.compat.versions import PAIRS, Pair

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "matrix"


@dataclass(frozen=True)
class Result:
    """What pytest counted with ``pair``; ``trouble`` where it did not come to that."""

    pair: Pair
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    trouble: str = ""

    @property
    def is_green(self) -> bool:
        return not self.trouble and self.failed == 0 and self.passed > 0


def run(command: Sequence[str | Path], env: dict[str, str]) -> None:
    subprocess.run([*map(str, command)], cwd=ROOT, env=env, check=True)


def make(folder: Path, pair: Pair, flags: Sequence[str], env: dict[str, str]) -> None:
    """An environment with nothing but ``pair``, this package and what its tests need."""
    run([sys.executable, "-m", "venv", folder], env)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", *flags]
    run([*pip, "numpy", "setuptools>=77", "wheel", "ninja", "packaging"], env)
    run([*pip, f"torch=={pair.torch}"], env)
    kept = folder / "constraints.txt"
    kept.write_text(f"torch=={pair.torch}\ndeepspeed=={pair.deepspeed}\n")
    pip += ["--no-build-isolation", "-c", str(kept)]
    run([*pip, f"deepspeed=={pair.deepspeed}"], {**env, "DS_BUILD_OPS": "0"})
    run([*pip, "--editable", ".[test]"], env)


def test(folder: Path, pair: Pair, arguments: Sequence[str], env: dict[str, str]) -> Result:
    """Runs pytest in the environment ``folder``."""
    python = folder / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "from ds_fgoffload.compat.versions import installed as i; print(*i())"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.stdout.split()[-2:] != list(pair):
        return Result(pair, trouble=f"{folder} has {found.stdout.split()[-2:]}: remove it. {found.stderr[-2000:]}")
    counts = folder / "counts.xml"
    counts.unlink(missing_ok=True)
    began = time.monotonic()
    subprocess.run([python, "-m", "pytest", "-q", f"--junitxml={counts}", *arguments], cwd=ROOT, env=env, check=False)
    seconds = time.monotonic() - began
    if not counts.exists():
        return Result(pair, seconds=seconds, trouble="pytest ended without a result")
    (suite,) = ET.parse(counts).getroot().iter("testsuite")
    tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return Result(pair, tests - skipped - failed, failed, skipped, seconds)


def try_pair(pair: Pair, arguments: argparse.Namespace) -> Result:
    """Makes the environment, runs the tests in it and removes it."""
    folder = FOLDER / f"torch-{pair.torch}-deepspeed-{pair.deepspeed}"
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),  # what one pair has compiled is not the other's
    }
    is_ours = not folder.exists()
    try:
        if is_ours:
            print(f"matrix: {pair}: {folder}", flush=True)
            make(folder, pair, arguments.pip_flags.split(), env)
        return test(folder, pair, arguments.tests, env)
    except subprocess.CalledProcessError as error:
        return Result(pair, trouble=f"could not be installed: {error}")
    finally:
        if is_ours and not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the environments that are made")
    parser.add_argument("--only", default="", help="the pairs whose name has this in it, such as 2.15")
    parser.add_argument("--pip-flags", default="", help="for every pip install")
    parser.add_argument("tests", nargs="*", help="for pytest")
    arguments = parser.parse_args()
    results = [try_pair(pair, arguments) for pair in PAIRS if arguments.only in str(pair)]
    table = Table("torch", "DeepSpeed", "passed", "failed", "skipped", "seconds", "", title="matrix")
    for one in results:
        counts = (one.passed, one.failed, one.skipped, round(one.seconds))
        table.add_row(*one.pair, *map(str, counts), one.trouble or ("green" if one.is_green else "red"))
    Console().print(table)
    return 0 if results and all(one.is_green for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
