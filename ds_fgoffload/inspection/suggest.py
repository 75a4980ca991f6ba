"""Ready-made ``modules`` lists for a model, from what one of its micro-batches saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ds_fgoffload.inspection.inventory import Inventory, Moves
from ds_fgoffload.selection import aliases
from ds_fgoffload.selection.families import MEANINGS
from ds_fgoffload.selection.patterns import select
from ds_fgoffload.text.names import shape

HALF = 0.5
_LEAST_SHARE, _MOST_SHARE = 0.02, 0.7
_COARSE = frozenset({"layer", "layernorm"})
"""Aliases that are no part of a layer on their own."""


@dataclass(frozen=True)
class Suggestion:
    """Patterns for ``modules``, and what they do in one micro-batch."""

    title: str
    modules: tuple[str, ...]
    moves: Moves


@dataclass(frozen=True)
class Candidate:
    """A pattern and the units that it selects."""

    pattern: str
    units: frozenset[str]
    moves: Moves


def candidates(root: nn.Module, inventory: Inventory, min_tensor_bytes: int) -> list[Candidate]:
    """Every alias and every name that repeats from layer to layer, as far as it moves anything; most freed first."""
    found: dict[frozenset[str], Candidate] = {}
    for pattern, units in _patterns(root, inventory):
        moves = inventory.moves(units, (), min_tensor_bytes)
        if moves.moved_bytes and units not in found:
            found[units] = Candidate(pattern, units, moves)
    return sorted(found.values(), key=lambda candidate: -candidate.moves.freed_bytes)


def suggest(root: nn.Module, inventory: Inventory, min_tensor_bytes: int) -> list[Suggestion]:
    """The few large copies that free half of what can be freed, and all of it; none if nothing can be freed."""
    choice = candidates(root, inventory, min_tensor_bytes)
    if not choice or not choice[0].moves.freed_bytes:
        return []
    most = choice[0]
    suggestions = []
    picked, moves = _few_large_copies(inventory, choice, min_tensor_bytes, HALF * most.moves.freed_bytes)
    if picked and moves.freed_bytes < 0.9 * most.moves.freed_bytes:
        suggestions.append(Suggestion("few large copies", tuple(picked), moves))
    largest_part = next((c for c in choice if c.pattern.startswith("@") and c.pattern[1:] not in _COARSE), None)
    if largest_part is not None and largest_part.moves.freed_bytes > 1.1 * moves.freed_bytes:
        suggestions.append(Suggestion("the part that frees most", (largest_part.pattern,), largest_part.moves))
    suggestions.append(Suggestion("as much as possible", (most.pattern,), most.moves))
    return suggestions


def _few_large_copies(
    inventory: Inventory, choice: Sequence[Candidate], min_tensor_bytes: int, enough_bytes: float
) -> tuple[list[str], Moves]:
    """Patterns with the largest storages first, until they free ``enough_bytes``; none that frees nearly all alone."""
    most = choice[0].moves.freed_bytes
    least = _LEAST_SHARE * most
    by_size = sorted(
        (candidate for candidate in choice if least <= candidate.moves.freed_bytes <= _MOST_SHARE * most),
        key=lambda candidate: -candidate.moves.moved_bytes / candidate.moves.storages,
    )
    picked: list[Candidate] = []
    units: frozenset[str] = frozenset()
    moves = Moves()
    for candidate in by_size:
        if moves.freed_bytes >= enough_bytes:
            break
        more = inventory.moves(units | candidate.units, (), min_tensor_bytes)
        if more.freed_bytes - moves.freed_bytes >= least:
            picked = [c for c in picked if not _lies_in(c, candidate)] + [candidate]
            units |= candidate.units
            moves = more
    return [candidate.pattern for candidate in picked], moves


def _lies_in(one: Candidate, other: Candidate) -> bool:
    """Whether each unit of ``one`` lies in a unit of ``other``."""
    return all(any(unit == outer or unit.startswith(f"{outer}.") for outer in other.units) for unit in one.units)


def _patterns(root: nn.Module, inventory: Inventory) -> Iterator[tuple[str, frozenset[str]]]:
    named = list(root.named_modules())
    for word in MEANINGS:
        names = frozenset(aliases.resolve(f"@{word}", named).names)
        if names:
            yield f"@{word}", names
    for form in dict.fromkeys(shape(name) for name in inventory.classes if name):
        pattern = form.replace("#", "*")
        yield pattern, frozenset(select(root, [pattern]).units)
