"""Runs a training script that knows nothing of this package, with another function in place of deepspeed.initialize."""

from __future__ import annotations

import functools
import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import deepspeed

from ds_fgoffload.errors import OffloadStateError

Engine: TypeAlias = tuple[Any, Any, Any, Any]
Initialize: TypeAlias = Callable[..., Engine]
"""Is given the original ``deepspeed.initialize``, then what the script called it with; returns what that returns."""


class NoScriptError(OffloadStateError):
    """There is no such script."""


class UserScript(NamedTuple):
    """A script or module, as Python itself would run it."""

    target: str
    arguments: list[str]
    as_module: bool

    @classmethod
    def of(cls, arguments: Sequence[str]) -> UserScript | None:
        """What follows the runner on the command line: ``script.py ...`` or ``-m package.module ...``; None if neither.

        Launchers put ``--local_rank=N`` in front of the script; the script gets it.
        """
        first = 0
        while first < len(arguments) and arguments[first].startswith("--local"):
            first += 1
        launcher_arguments, rest = list(arguments[:first]), list(arguments[first:])
        as_module = rest[:1] == ["-m"]
        if as_module:
            rest = rest[1:]
        if not rest or rest[0].startswith("-"):
            return None
        return cls(rest[0], launcher_arguments + rest[1:], as_module)

    def run(self, initialize: Initialize) -> None:
        """Returns when the script has ended, also by ``sys.exit(0)``; what it raises otherwise is raised.

        Raises:
            NoScriptError: there is nothing to run.
        """
        with initialize_replaced(initialize):
            sys.argv = [self.target, *self.arguments]
            try:
                if self.as_module:
                    sys.path[0] = ""
                    self._look_for_module()
                    runpy.run_module(self.target, run_name="__main__", alter_sys=True)
                else:
                    self._look_for_file()
                    sys.path[0] = str(Path(self.target).resolve().parent)
                    runpy.run_path(self.target, run_name="__main__")
            except SystemExit as exit_:
                if exit_.code not in (None, 0):
                    raise

    def _look_for_file(self) -> None:
        if not Path(self.target).exists():
            raise NoScriptError(
                f"there is no script {self.target} in {Path.cwd()}: give the path of one, or -m package.module"
            )

    def _look_for_module(self) -> None:
        try:
            found = importlib.util.find_spec(self.target) is not None
        except ModuleNotFoundError as error:
            if not f"{self.target}.".startswith(f"{error.name}."):
                raise  # the package is there, but lacks something that it imports
            found = False
        if not found:
            raise NoScriptError(
                f"there is no module {self.target}, as seen from {Path.cwd()}: give the name of one, or a script's path"
            )


@contextmanager
def initialize_replaced(initialize: Initialize) -> Iterator[None]:
    """``deepspeed.initialize`` is ``initialize`` meanwhile, on top of the original."""
    original = deepspeed.initialize

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Engine:
        return initialize(original, *args, **kwargs)

    deepspeed.initialize = replaced
    try:
        yield
    finally:
        deepspeed.initialize = original
