"""Runs a training script that nobody wants to edit: ``deepspeed --module ds_fgoffload.run train.py ...``.

``deepspeed.initialize`` is :func:`ds_fgoffload.initialize` while the script runs; the section in its ds_config.json
does the rest. Works as well under ``torchrun -m`` and ``accelerate launch -m``. A module is run with
``ds_fgoffload.run -m package.module ...``.

When the script has ended, rank 0 prints the report; a rank whose script fails prints its own counts, as the others may
be gone. An error in the section is told in a sentence, without a traceback; the exit code is 2 then.
``DS_FGOFFLOAD_STATS_JSON`` may name a file for the counts of all ranks, a dictionary for each rank of each engine.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed
from deepspeed.utils import logger

from ds_fgoffload import api
from ds_fgoffload.compat.private import default_store
from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.reporting.report import render
from ds_fgoffload.reporting.tally import is_switched_off, tallies
from ds_fgoffload.script import NoScriptError, UserScript
from ds_fgoffload.text.messages import NOTHING_OFFLOADED, SWITCHED_OFF, show
from ds_fgoffload.text.messages import rank as rank_now

STATS_FILE_VARIABLE = "DS_FGOFFLOAD_STATS_JSON"
_PATIENCE = timedelta(minutes=5)
_USAGE = "usage: deepspeed --module ds_fgoffload.run [-m package.module | script.py] [arguments of the script]"
_HELP = f"""{_USAGE}

Runs a training script with the fine_grained_offload section of its DeepSpeed configuration, and prints the report when
the script has ended. The script needs no change. torchrun -m and accelerate launch -m will do as well as deepspeed.

{STATS_FILE_VARIABLE}=FILE   the counts of all ranks are written to FILE, as JSON
"""


def main(arguments: Sequence[str]) -> None:
    """``arguments``: what follows the module's name; launchers put ``--local_rank=N`` in front of the script."""
    board = _Board()
    script = UserScript.of(arguments)
    if script is None:
        if {"-h", "--help"} & {next((word for word in arguments if not word.startswith("--local")), "")}:
            show(_HELP)
            sys.exit(0)
        _fail(_USAGE)

    def initialize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        made = api.initialize_with(original, *args, **kwargs)
        board.find()
        return made

    # now, as the script may go to another folder
    stats_file = Path(os.environ[STATS_FILE_VARIABLE]).absolute() if os.environ.get(STATS_FILE_VARIABLE) else None
    try:
        script.run(initialize)
    except BaseException as error:
        _tell_own(error)
        if isinstance(error, OffloadConfigError | NoScriptError):
            _fail(f"error: {error}")
        raise
    _tell(board, stats_file)


class _Board:
    """Where every rank leaves its counts for rank 0: the store of the process group, which outlives the group.

    Scripts destroy their group before they end. And nobody but rank 0 waits here, so that a rank that failed does not
    keep the others from ending.
    """

    def __init__(self) -> None:
        self.rank, self._ranks = 0, 1
        self._store: Any = None

    def find(self) -> None:
        """Looks for the process group, which exists once an engine does."""
        if self._store is None and torch.distributed.is_initialized():
            self._store = default_store()
            self.rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def gather(self, item: Any) -> list[Any]:
        """On rank 0 ``item`` of each rank, or its own if the others leave none in time; elsewhere nothing of use."""
        if self._store is None:
            return [item]
        try:
            if self.rank:
                self._store.set(_key(self.rank), pickle.dumps(item))
                return []
            others = [_key(rank) for rank in range(1, self._ranks)]
            self._store.wait(others, _PATIENCE)
            return [item, *(pickle.loads(self._store.get(key)) for key in others)]  # noqa: S301 - from our own ranks
        except RuntimeError as error:
            logger.warning(f"fine_grained_offload: rank {self.rank} tells its own counts only: {error}")
            return [item]


def _tell(board: _Board, stats_file: Path | None) -> None:
    mine = [(tally.counts(board.rank), tally.has_news) for tally in tallies()]
    ranks = board.gather(mine)
    if board.rank:
        return
    if not mine:
        logger.warning(SWITCHED_OFF if is_switched_off() else NOTHING_OFFLOADED)
    engines = []
    for of_ranks in zip(*ranks, strict=False):
        engine, news = zip(*of_ranks, strict=True)
        engines.append(engine)
        if any(news):
            show(render(engine))
    if stats_file is not None:
        counts = [{"engine": i, **rank.as_dict()} for i, engine in enumerate(engines) for rank in engine]
        try:
            stats_file.write_text(json.dumps(counts, indent=2), encoding="utf-8")
        except OSError as error:  # the training has succeeded
            logger.warning(f"fine_grained_offload: {STATS_FILE_VARIABLE}: the counts are not written: {error}")


def _tell_own(error: BaseException) -> None:
    """The script has failed: what this rank has counted, and asks nobody else for."""
    try:
        for tally in tallies():
            if tally.has_news and not tally.is_empty:
                own = tally.counts(rank_now())
                head = (
                    f"fine_grained_offload: rank {own.rank} ends by {type(error).__name__}; its own counts until then:"
                )
                show(f"{head}\n{render([own])}")
    except Exception as another:  # noqa: BLE001 - on a device that has failed, say; what the script raised counts
        logger.warning(f"fine_grained_offload: no counts, as {type(another).__name__} was raised: {another}")


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    raise SystemExit(2) from None


def _key(rank: int) -> str:
    return f"fine_grained_offload/counts/{rank}"


if __name__ == "__main__":
    main(sys.argv[1:])
