"""Runs a training script that nobody wants to edit: ``deepspeed --module ds_fgoffload.run train.py ...``.

``deepspeed.initialize`` is :func:`ds_fgoffload.initialize` while the script runs; the section in its ds_config.json does
the rest. Works as well under ``torchrun -m`` and ``accelerate launch -m``. A module is run with
``ds_fgoffload.run -m package.module ...``.

When the script has ended, rank 0 prints the report. ``DS_FGOFFLOAD_STATS_JSON`` may name a file that then gets the
counts of all ranks.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import deepspeed
from deepspeed.utils import logger

from ds_fgoffload import api

STATS_FILE_VARIABLE = "DS_FGOFFLOAD_STATS_JSON"
_USAGE = "usage: deepspeed --module ds_fgoffload.run [-m package.module | script.py] [arguments of the script]"


def main(arguments: Sequence[str]) -> None:
    """``arguments``: what follows the module's name; launchers put ``--local_rank=N`` in front of the script."""
    first = 0
    while first < len(arguments) and arguments[first].startswith("--local"):
        first += 1
    launcher_arguments, rest = list(arguments[:first]), list(arguments[first:])
    as_module = rest[:1] == ["-m"]
    if as_module:
        rest = rest[1:]
    if not rest or rest[0].startswith("-"):
        sys.exit(_USAGE)
    target, script_arguments = rest[0], launcher_arguments + rest[1:]
    with _offloading_initialize():
        sys.argv = [target, *script_arguments]
        if as_module:
            sys.path.insert(0, "")
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")
    _tell()


@contextmanager
def _offloading_initialize() -> Iterator[None]:
    original = deepspeed.initialize
    deepspeed.initialize = functools.wraps(original)(functools.partial(api.initialize_with, original))
    try:
        yield
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise
    finally:
        deepspeed.initialize = original


def _tell() -> None:
    attachments = api.attachments()
    rank = int(os.environ.get("RANK", "0"))
    if not attachments and rank == 0:
        logger.warning(
            "fine_grained_offload: nothing was offloaded, since no engine was made with a fine_grained_offload section"
        )
    for attachment in attachments:
        table, counts = attachment.report(), attachment.gathered_counts()
        if rank == 0:
            print(table)  # noqa: T201  # the user asked for it by starting this module
            if path := os.environ.get(STATS_FILE_VARIABLE):
                Path(path).write_text(json.dumps(counts, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
