"""What the user is told while a run goes on: once for all ranks, where all would say the same."""

from __future__ import annotations

import os

import torch.distributed
from deepspeed.utils import logger


def rank() -> int:
    """This process's rank, also before there is a process group and after it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def warn(message: str) -> None:
    """A warning that holds for every rank: rank 0 says it."""
    if rank() == 0:
        logger.warning(message)


def warn_here(message: str) -> None:
    """A warning about what this rank alone has, such as a pipeline stage's units."""
    logger.warning(message)
