"""``@alias`` patterns: one vocabulary for the parts of a decoder layer, resolved to each model family's own names.

The words are those of Megatron-Core's ``--offload-modules`` and ``--recompute-modules``, and a few more. A family is
known by the class of its decoder layer, wherever in the model that lies (PEFT, a pipeline and a vision model put other
names in front). Where a family has no module for a word, the alias takes the nearest that there is and a note says so.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ds_fgoffload.selection.families import FAMILIES, MEANINGS


class Resolved(NamedTuple):
    """The modules that an alias stands for, in one model."""

    names: frozenset[str]
    notes: tuple[str, ...]
    families: tuple[str, ...]
    """The classes of the layers that are known in this model, whether they have the part or not."""


def resolve(alias: str, named: Sequence[tuple[str, nn.Module]]) -> Resolved:
    """What ``alias`` (with its ``@``) stands for among ``named``, the ``named_modules()`` of a model.

    Raises:
        ValueError: there is no such alias.
    """
    word = alias.removeprefix("@")
    if word not in MEANINGS:
        near = difflib.get_close_matches(word, MEANINGS, n=1)
        hint = f' (nearest: "@{near[0]}")' if near else ""
        raise ValueError(
            f'pattern "{alias}": no such alias{hint}; allowed: {", ".join(f"@{name}" for name in MEANINGS)}'
        )
    names: set[str] = set()
    notes: dict[str, None] = {}
    families: dict[str, None] = {}
    for index, (prefix, layer) in enumerate(named):
        family = _family_of(layer)
        if family is None:
            continue
        families[family] = None
        inside = _below(prefix, named[index + 1 :])
        for choice in FAMILIES[family].get(word, ()):
            found = [name for name, relative in inside if _is_one_of(relative, choice.paths)]
            if found and any(relative == choice.beside for _, relative in inside):
                names.update(found)
                if choice.note:
                    notes[f"@{word} in {type(layer).__name__}: {choice.note}"] = None
                break
    return Resolved(frozenset(names), tuple(notes), tuple(families))


def words_of(family: str) -> list[str]:
    """The aliases that a layer of this class may have, with their ``@``."""
    return [f"@{word}" for word in MEANINGS if word in FAMILIES[family]]


def _family_of(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        # DeepSpeed's MoE has a name that others may have given, too.
        if cls.__name__ in FAMILIES and (cls.__name__ != "MoE" or cls.__module__.startswith("deepspeed.")):
            return cls.__name__
    return None


def _below(prefix: str, following: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, str]]:
    """Names at and below ``prefix``, with what they are relative to it; ``following`` is depth first."""
    start = f"{prefix}." if prefix else ""
    inside = itertools.takewhile(lambda entry: entry[0].startswith(start), following)
    return [(prefix, ""), *((name, name[len(start) :]) for name, _ in inside)]


def _is_one_of(relative: str, paths: Sequence[str]) -> bool:
    return any(re.fullmatch(_expression(path), relative) for path in paths)


@functools.cache
def _expression(path: str) -> str:
    return r"\d+".join(re.escape(piece) for piece in path.split("#"))
