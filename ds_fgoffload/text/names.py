"""Names of modules as people read them: what repeats from layer to layer is said once, ``model.layers.{0..31}.mlp``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST_SHOWN = 3
_NEAR = 0.6


def shape(name: str) -> str:
    """``name`` with ``#`` for each part that is a number."""
    return _NUMBER.sub("#", name)


def families(names: Iterable[str]) -> dict[str, list[str]]:
    """The names that differ in numbers only, under one abbreviation of them all, in the order of their first."""
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(shape(name), []).append(name)
    return {_abbreviation(form, found): found for form, found in members.items()}


def abbreviated(names: Iterable[str]) -> str:
    """A list of names, short enough for a log line."""
    return ", ".join(families(names))


def one_per_shape(names: Sequence[str]) -> tuple[str, ...]:
    """The first name of each shape."""
    shapes: dict[str, str] = {}
    for name in names:
        if name:
            shapes.setdefault(shape(name), name)
    return tuple(shapes.values())


def nearest(pattern: str, names: Sequence[str], classes: Sequence[str], count: int = 3) -> list[str]:
    """The ``count`` names (classes, for a ``class:`` pattern) most like ``pattern``, each of another shape."""
    prefix = "class:" if pattern.startswith("class:") else ""
    wanted = shape(_spelled(pattern.removeprefix(prefix)))
    if prefix:
        wanted = wanted.rpartition(".")[2]
    parts = wanted.count(".") + 1
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted)
    scored = []
    for name in classes if prefix else names:
        form = shape(name)
        # A pattern often lacks the beginning of the name ("layers.0.mlp" for "model.layers.0.mlp"), so that the end of
        # a name counts too, a little less.
        for text, worth in {form: 1.0, ".".join(form.split(".")[-parts:]): 0.95}.items():
            matcher.set_seq1(text)
            if matcher.real_quick_ratio() >= _NEAR and matcher.quick_ratio() >= _NEAR:
                scored.append((-worth * matcher.ratio(), name))
    found: dict[str, str] = {}
    for score, name in sorted(scored):
        if -score >= _NEAR and len(found) < count:
            found.setdefault(re.sub(r"\d+", "#", name), prefix + name)
    return list(found.values())


def _abbreviation(form: str, names: Sequence[str]) -> str:
    columns = list(zip(*([int(number) for number in _NUMBER.findall(name)] for name in names), strict=True))
    if math.prod(len(set(column)) for column in columns) != len(set(names)):  # not every combination is there
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        return f"{', '.join(names[:_MOST_SHOWN])}{more}"
    ranges = iter([_range(sorted(set(column))) for column in columns])
    return re.sub("#", lambda _: next(ranges), form) if columns else form


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return f"{{{','.join(texts)}}}"


def _spelled(pattern: str) -> str:
    """A pattern as the name it might stand for: wildcards in place of numbers become numbers, others go."""
    text = pattern
    if text.startswith("re:"):
        text = re.sub(r"\\d[+*]?|\.[*+]|\[[^]]*\][+*]?", "*", text[3:]).replace("\\", "")
    text = re.sub(r"(?<![^.])[*?]+(?![^.])", "0", re.sub(r"\[[^]]*\]", "*", text))
    return re.sub(r"[*?()|^$]", "", text.removeprefix("0."))
