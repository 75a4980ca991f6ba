"""What ``ds-fgoffload inspect`` says of a script that raised: the script's own lines, and what to do about it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary, TracebackException

import torch

import ds_fgoffload

_OURS = str(Path(ds_fgoffload.__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = {"site-packages", "dist-packages"}


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether it is the device's memory, also where it was wrapped in something else."""
    return any(isinstance(one, torch.OutOfMemoryError) for one in _chain(error))


def own_traceback(error: BaseException) -> str:
    """The traceback with the frames of the script alone, and the innermost, which raised."""
    whole = TracebackException.from_exception(error)
    shortened = False
    one: TracebackException | None = whole
    while one is not None:
        frames = list(one.stack)
        while frames and _around(frames[0].filename):
            frames.pop(0)
        kept = [frame for frame in frames[:-1] if not _of_a_library(frame.filename)] + frames[-1:]
        shortened |= len(kept) < len(frames)
        one.stack = StackSummary.from_list(kept)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    text = "".join(whole.format())
    return f"{text}(frames of libraries are left out)\n" if shortened else text


def _around(filename: str) -> bool:
    """What this command puts around the script."""
    return filename.startswith((_OURS, "<frozen ")) or Path(filename).name == "runpy.py"


def _of_a_library(filename: str) -> bool:
    return filename.startswith((_OURS, "<", *_LIBRARIES)) or bool(_INSTALLED & set(Path(filename).parts))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
