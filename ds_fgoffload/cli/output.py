"""Where commands write: files that are looked at before the work, and a standard output for JSON alone."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

from deepspeed.utils import logger


def why_not_writable(file: Path) -> str | None:
    """Why ``file`` cannot be written and what to do, as far as that can be seen without writing; None if it can."""
    if file.is_dir():
        return "is a folder; give the path of a file"
    if file.exists():
        return None if os.access(file, os.W_OK) else "may not be written; give another path"
    folder = file.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {file.parent}; make it, or give another path"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder} may not be written; give another"


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """What is printed or logged to the standard output meanwhile goes to the standard error."""
    out = sys.stdout
    with ExitStack() as undo:
        undo.enter_context(redirect_stdout(sys.stderr))
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is out:
                undo.callback(handler.setStream, out)
                handler.setStream(sys.stderr)
        yield


def open_missing_streams() -> None:
    """Where the standard output or error is closed, what goes there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
