"""Messages to the user while a run goes on: once for all ranks, where all would say the same."""

from __future__ import annotations

import contextlib
import os
import sys

import torch.distributed
from deepspeed.utils import logger

NOTHING_OFFLOADED = (
    "fine_grained_offload: nothing was offloaded, since no engine was made with a fine_grained_offload section: "
    "the section belongs into the configuration that the script gives DeepSpeed"
)
SWITCHED_OFF = 'fine_grained_offload: nothing was offloaded, since "enabled" is false'
_LINES = str.maketrans("━┃─│┏┳┓┡╇┩├┼┤└┴┘", "=|-|++++++++++++")


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


def show(text: str) -> None:
    """Prints ``text``, as far as the standard output can. Never raises: no training ends for a report."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, it is closed, or the disk is full
        try:
            print(printable(text), flush=True)  # noqa: T201 - reports are asked for
        except UnicodeError:  # it cannot hold what its encoding says that it can
            print(_in_ascii(text), flush=True)  # noqa: T201


def printable(text: str) -> str:
    """``text``, or the same in ASCII if the encoding of the standard output cannot hold it."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeError, LookupError):
        return _in_ascii(text)
    return text


def _in_ascii(text: str) -> str:
    return text.translate(_LINES).encode("ascii", "backslashreplace").decode("ascii")
