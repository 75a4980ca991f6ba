"""``ds-fgoffload plan``: what plan files have planned, and would plan under other settings; no GPU is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ds_fgoffload.errors import OffloadConfigError, PlanFileError
from ds_fgoffload.planning import plan_file
from ds_fgoffload.planning.plan_file import PlanFile
from ds_fgoffload.planning.what_if import Link, Settings, WhatIf, what_if
from ds_fgoffload.text.sizes import human, parse_size

_NONE = "none"
_REMEDY = "give a file that training wrote for the key plan_file of the fine_grained_offload section"
T = TypeVar("T")


class WrongArgumentError(OffloadConfigError):
    """What the command was given cannot be used."""

    exit_code = 2


@dataclass(frozen=True)
class Asked:
    """The options as they were typed; None: not given, and then it is as in the file."""

    max_overhead: str | None = None
    target: str | None = None
    device_memory: str | None = None
    link: str | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())

    def settings(self, file: PlanFile) -> Settings:
        """Those of the run that wrote ``file``, but for what is asked otherwise."""
        settings = Settings.of_file(file)
        goal = settings.goal
        if self.max_overhead is not None:
            goal = replace(goal, max_overhead=_parsed("--max-overhead", self.max_overhead, _optional(_fraction)))
        if self.target is not None:
            goal = replace(goal, target_saved_bytes=_parsed("--target", self.target, _optional(parse_size)))
        settings = replace(settings, goal=goal, size=self.tokens)
        if self.device_memory is not None:
            device_bytes = _parsed("--device-memory", self.device_memory, _some_bytes)
            settings = replace(settings, device_bytes=device_bytes)
        if self.link is not None:
            settings = replace(settings, link=_parsed("--link", self.link, _link))
        return settings


@dataclass(frozen=True)
class Found:
    """A file, and the plan."""

    path: Path
    file: PlanFile
    asked: Asked
    plan: WhatIf

    @property
    def title(self) -> str:
        return f"{self.path.name} {self.asked}".strip()


def plans(paths: Sequence[Path], asked: Asked) -> list[Found]:
    """The plan of each file under what is asked; of one file given twice, the first is as the file has it.

    Raises:
        WrongArgumentError: a file or an option cannot be used.
    """
    files = [_read(path) for path in paths]
    each = [asked] * len(paths)
    if len(paths) == 2 and paths[0].resolve() == paths[1].resolve():
        if asked == Asked():
            raise WrongArgumentError(
                f"{paths[0]} is given twice and without an option: there is nothing to compare; give another file, or "
                "what is to be different, such as --link 25GB/s"
            )
        each[0] = Asked()
    return [_found(path, file, one) for path, file, one in zip(paths, files, each, strict=True)]


def _found(path: Path, file: PlanFile, asked: Asked) -> Found:
    settings = asked.settings(file)
    try:
        return Found(path, file, asked, what_if(file, settings))
    except PlanFileError as error:
        raise WrongArgumentError(f"{path}: {error}") from None


def _read(path: Path) -> PlanFile:
    try:
        return plan_file.read(path)
    except PlanFileError as error:
        raise WrongArgumentError(f"{error}; {_REMEDY}") from None


def rate(bytes_per_ms: float) -> str:
    """In the unit that links are spoken of in."""
    gb_s = bytes_per_ms / 1e6
    return f"{gb_s:.1f} GB/s" if gb_s >= 0.1 else f"{human(round(1000 * bytes_per_ms))}/s"


def _parsed(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise WrongArgumentError(f"{option} {text}: allowed: {error}") from None


def _optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return None if text == _NONE else parse(text)
        except ValueError as error:
            raise ValueError(f"{error}, or {_NONE}") from None

    return parsed


def _fraction(text: str) -> float:
    allowed = "the part of the time that may be added, such as 0.01, or 1%"
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(allowed) from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(allowed)
    if number > 1 and not text.endswith("%"):  # five per cent is more likely meant than five times the time
        raise ValueError(f"{allowed} ({text} would be {100 * number:.0f}%; write that if it is meant)")
    return number / 100 if text.endswith("%") else number


def _some_bytes(text: str) -> int:
    size_bytes = parse_size(text)
    if not size_bytes:
        raise ValueError("more than 0 bytes, such as 80GB")
    return size_bytes


def _link(text: str) -> Link:
    allowed = "a rate above 0 such as 25GB/s, or how many times as fast as it was measured, such as 0.5x"
    try:
        link = Link(times=float(text[:-1])) if text.endswith("x") else Link(bytes_per_ms=_bytes_per_ms(text))
    except ValueError:
        raise ValueError(allowed) from None
    if not math.isfinite(link.times) or link.times <= 0 or link.bytes_per_ms == 0:
        raise ValueError(allowed)
    return link


def _bytes_per_ms(text: str) -> float:
    size, slash, second = text.rpartition("/")
    if not slash or second != "s":
        raise ValueError
    return parse_size(size) / 1000
