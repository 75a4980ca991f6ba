"""Runs a training script that nobody wants to edit: ``deepspeed --module ds_fgoffload.run train.py ...``.

``deepspeed.initialize`` is :func:`ds_fgoffload.initialize` while the script runs; the section in its ds_config.json
does the rest. Works as well under ``torchrun -m`` and ``accelerate launch -m``. A module is run with
``ds_fgoffload.run -m package.module ...``.

When the script has ended, rank 0 prints the report. ``DS_FGOFFLOAD_STATS_JSON`` may name a file that then gets the
counts of all ranks, a dictionary for each rank of each engine.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from deepspeed.utils import logger

from ds_fgoffload import api
from ds_fgoffload.report import render
from ds_fgoffload.script import UserScript

STATS_FILE_VARIABLE = "DS_FGOFFLOAD_STATS_JSON"
_PATIENCE = timedelta(minutes=5)
_USAGE = "usage: deepspeed --module ds_fgoffload.run [-m package.module | script.py] [arguments of the script]"


def main(arguments: Sequence[str]) -> None:
    """``arguments``: what follows the module's name; launchers put ``--local_rank=N`` in front of the script."""
    board = _Board()
    script = UserScript.of(arguments)
    if script is None:
        sys.exit(_USAGE)

    def initialize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        made = api.initialize_with(original, *args, **kwargs)
        board.find()
        return made

    script.run(initialize)
    _tell(board)


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
            self._store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - no public name
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


def _tell(board: _Board) -> None:
    mine = [tally.counts(board.rank) for tally in api.tallies()]
    ranks = board.gather(mine)
    if board.rank:
        return
    if not mine:
        logger.warning(
            "fine_grained_offload: nothing was offloaded, since no engine was made with a fine_grained_offload section"
        )
    engines = list(zip(*ranks, strict=False))
    for engine in engines:
        print(render(engine))  # noqa: T201 - the user asked for it by starting this module
    if path := os.environ.get(STATS_FILE_VARIABLE):
        counts = [{"engine": i, **rank.as_dict()} for i, engine in enumerate(engines) for rank in engine]
        Path(path).write_text(json.dumps(counts, indent=2), encoding="utf-8")


def _key(rank: int) -> str:
    return f"fine_grained_offload/counts/{rank}"


if __name__ == "__main__":
    main(sys.argv[1:])
