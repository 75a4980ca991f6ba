"""Which modules are units: turns the patterns of the configuration into modules, before any tensor is saved.

A pattern is matched against the full names of ``model.named_modules()``:

=================  ====================================================================================================
``layers.*.mlp``   a shell glob over the whole name; ``*`` also crosses dots
``re:...``         a regular expression that the whole name must match
``class:Name``     the class name, or the qualified ``module.Name``; also globs
``@alias``         a part of a decoder layer, such as ``@attn_norm``, by the family's own names: :mod:`.aliases`
=================  ====================================================================================================

Rules:

1. The outermost match of a pattern is the unit. What lies below it belongs to it, so ``layers.*`` means the layers and
   not everything inside them, and ``*`` means the whole model as one unit.
2. Two different patterns may select modules that lie inside each other. Each is a unit then, and a tensor belongs to
   the innermost one.
3. ``exclude`` wins: an excluded module, and all below it, is not offloaded, also inside a unit.
4. A module that is never called cannot be a unit (``ModuleList``, ``ModuleDict``: they have no ``forward``). A pattern
   that matches one means the modules in it, so ``layers``, ``layers*`` and ``layers.*`` are the same.
5. A module with several names (tied) is one unit, under the first of them; a pattern may use any. It is no unit if it
   is excluded, or lies below an excluded module, under any of them.
6. All of this holds for ``recompute`` as for ``modules``; a module may be under both.
7. A pattern that matches nothing on any rank is an error, and so is a selection of which nothing is left.

Matching needs this rank's modules and the check needs every rank's :class:`Findings`, because pipeline stages hold
different layers: :func:`match`, then gather, then :func:`check`. :func:`select` does both for a single process.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from ds_fgoffload.config import SECTION
from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.selection import aliases
from ds_fgoffload.selection.families import FAMILIES
from ds_fgoffload.text.names import nearest, one_per_shape, shape

_Named: TypeAlias = tuple[str, nn.Module]
_Test: TypeAlias = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Selection:
    """The units of this rank, in the order of ``named_modules()``."""

    units: dict[str, nn.Module]
    """Name to module."""

    recomputed: dict[str, nn.Module]
    """Units under ``recompute``, which may be units as well; name to module."""

    excluded: dict[str, nn.Module]
    """The outermost excluded modules inside some unit, as far as they are called: tensors saved in them stay put."""

    notes: tuple[str, ...] = ()
    """What an alias became, where the model has no module for just what it says."""


@dataclass(frozen=True)
class Unmatched:
    """A pattern that matches nothing on this rank."""

    key: str
    pattern: str
    remedy: str


@dataclass(frozen=True)
class Findings:
    """What one rank's matching says about the patterns: small, picklable, to be gathered for :func:`check`."""

    faults: tuple[str, ...]
    unmatched: tuple[Unmatched, ...]
    names: tuple[str, ...]
    """If something is unmatched: a name of each shape here (``layers.3.mlp`` and ``layers.4.mlp`` have one shape)."""
    classes: tuple[str, ...]
    """The same for class names."""
    selected: int
    """By the patterns of ``modules`` and ``recompute``."""
    units: int
    """What ``exclude`` has left of them."""
    selecting: tuple[str, ...]
    """Of ``modules`` and ``recompute`` those that have selected something."""


def select(
    root: nn.Module, modules: Sequence[str], exclude: Sequence[str] = (), recompute: Sequence[str] = ()
) -> Selection:
    """The selection in a single process. Raises :class:`OffloadConfigError`."""
    selection, findings = match(root, modules, exclude, recompute)
    check([findings])
    return selection


def match(
    root: nn.Module, modules: Sequence[str], exclude: Sequence[str] = (), recompute: Sequence[str] = ()
) -> tuple[Selection, Findings]:
    """This rank's selection, and what :func:`check` must hear of it. Raises nothing for a bad pattern."""
    named = list(root.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, module in named:
        first.setdefault(id(module), name)
    faults: list[str] = []
    unmatched: list[Unmatched] = []
    selected: dict[str, set[int]] = {"modules": set(), "recompute": set()}
    notes: dict[str, None] = {}
    barred: set[int] = set()
    for key, patterns in (("modules", modules), ("recompute", recompute), ("exclude", exclude)):
        for pattern in patterns:
            try:
                test = _compile(pattern, named, notes)
            except ValueError as error:
                faults.append(f"{SECTION}.{key}: {error}")
                continue
            hits = [(name, module) for name, module in named if test(name, module)]
            if key == "exclude":
                found = {id(module) for _, module in hits}
                barred |= found
            else:
                found = {id(module) for _, module in _outermost_called(_at_or_below(named, hits))}
                selected[key] |= found
            if not found:
                unmatched.append(Unmatched(key, pattern, _remedy(pattern, named)))

    out = _at_or_below(named, [entry for entry in named if id(entry[1]) in barred])
    out_ids = {id(module) for _, module in out}
    left = selected["modules"] - out_ids
    tops = [entry for entry in named if id(entry[1]) in left]
    units = {first[id(module)]: module for _, module in tops}
    again = selected["recompute"] - out_ids
    recomputed = {first[id(module)]: module for _, module in named if id(module) in again}
    inside = _at_or_below(named, tops)
    off = _at_or_below(inside, [entry for entry in inside if id(entry[1]) in barred])
    excluded = {first[id(module)]: module for _, module in _outermost_called(off)}
    return Selection(units, recomputed, excluded, tuple(notes)), Findings(
        faults=tuple(faults),
        unmatched=tuple(unmatched),
        names=one_per_shape([name for name, _ in named]) if unmatched else (),
        classes=tuple({type(module).__name__: None for _, module in named}) if unmatched else (),
        selected=sum(map(len, selected.values())),
        units=len(units) + len(recomputed),
        selecting=tuple(key for key, found in selected.items() if found),
    )


def check(findings: Sequence[Findings]) -> None:
    """Raises one :class:`OffloadConfigError` that names every faulty pattern, given the findings of all ranks."""
    lines = list(dict.fromkeys(fault for rank in findings for fault in rank.faults))
    assert findings
    everywhere = set.intersection(*({(u.key, u.pattern) for u in rank.unmatched} for rank in findings))
    remedies: dict[tuple[str, str], str] = {}
    for rank in findings:
        for u in rank.unmatched:
            if (u.key, u.pattern) in everywhere:
                remedies[u.key, u.pattern] = remedies.get((u.key, u.pattern)) or u.remedy
    if remedies:
        names = one_per_shape([name for rank in findings for name in rank.names])
        classes = tuple(dict.fromkeys(name for rank in findings for name in rank.classes))
        kinds = [f"class:{name}" for name in classes]
        for (key, pattern), remedy in remedies.items():
            near = [] if pattern.startswith("@") else nearest(pattern, names, classes)
            if near:
                hint = "nearest: " + ", ".join(f'"{name}"' for name in near)
            elif pattern.startswith("@"):
                hint = f"the names to choose from: {', '.join(_layer_names(names))}"
            else:
                hint = _some(kinds if pattern.startswith("class:") else names)
            lines.append(f'{SECTION}.{key}: pattern "{pattern}" matches no module ({hint}){remedy}')
    if not lines and any(rank.selected for rank in findings) and not any(rank.units for rank in findings):
        keys = [key for key in ("modules", "recompute") if any(key in rank.selecting for rank in findings)]
        who = f'"{keys[0]}" selects' if len(keys) == 1 else '"modules" and "recompute" select'
        lines.append(f"{SECTION}.exclude: excludes every module that {who}; narrow one or the other")
    if lines:
        raise OffloadConfigError("\n".join(lines))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:_SHOWN])
    return f"no name is near; there are {shown}{', ...' if len(names) > _SHOWN else ''}"


_SHOWN = 5


def _compile(pattern: str, named: Sequence[_Named], notes: dict[str, None]) -> _Test:
    """The test for one pattern; ``notes`` gets what an alias became. Raises ``ValueError`` if it cannot be read."""
    if pattern.startswith("@"):
        resolved = aliases.resolve(pattern, named)
        notes.update(dict.fromkeys(resolved.notes))
        return lambda name, _: name in resolved.names
    if pattern in {"", "re:", "class:"}:
        raise ValueError(f'pattern "{pattern}" is empty; write a name, a glob, "re:..." or "class:Name"')
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:]).fullmatch
        except re.error as error:
            raise ValueError(f'pattern "{pattern}" is not a regular expression: {error}') from None
        return lambda name, _: expression(name) is not None
    if pattern.startswith("class:"):
        glob = _glob(pattern[6:])
        known: dict[type, bool] = {}

        def of_class(_: str, module: nn.Module) -> bool:
            cls = type(module)
            if cls not in known:
                known[cls] = glob(cls.__name__) or glob(f"{cls.__module__}.{cls.__qualname__}")
            return known[cls]

        return of_class
    glob = _glob(pattern)
    return lambda name, _: glob(name)


def _glob(pattern: str) -> Callable[[str], bool]:
    test = re.compile(fnmatch.translate(pattern)).match
    return lambda text: test(text) is not None


def _is_called(module: nn.Module) -> bool:
    """False for a container that defines no ``forward``: hooks on it would never run."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _at_or_below(named: Sequence[_Named], tops: Sequence[_Named]) -> list[_Named]:
    """The entries of ``named`` that are one of ``tops`` or lie below one; both are depth first."""
    names = {name for name, _ in tops}
    region: list[_Named] = []
    prefix = None
    for name, module in named:
        if prefix is None or not name.startswith(prefix):
            if name not in names:
                continue
            prefix = f"{name}." if name else ""
        region.append((name, module))
    return region


def _outermost_called(region: Sequence[_Named]) -> list[_Named]:
    found: list[_Named] = []
    prefix = None
    for name, module in region:
        if (prefix is None or not name.startswith(prefix)) and _is_called(module):
            prefix = f"{name}." if name else ""
            found.append((name, module))
    return found


def _remedy(pattern: str, named: Sequence[_Named]) -> str:
    """What to write instead of a pattern that matches nothing, where that is plain."""
    if pattern.startswith("@"):
        families = aliases.resolve(pattern, named).families
        if families:
            return "".join(f"; a {family} has {', '.join(aliases.words_of(family))}" for family in families)
        return f"; aliases are known for layers of the classes {', '.join(FAMILIES)}"
    if pattern.startswith(("re:", "class:")):
        return ""
    exact, deeper = _glob(pattern), _glob(f"*.{pattern}")
    for name, module in named:
        if exact(name):
            return f'; "{name}" is a {type(module).__name__}, which is never called, and holds no module that is'
    return f'; to match at any depth write "*.{pattern}"' if any(deeper(name) for name, _ in named) else ""


def _layer_names(names: Sequence[str]) -> list[str]:
    """The names as patterns for any layer, as far as they lie in one; all of them, if none does."""
    forms = list(dict.fromkeys(shape(name).replace("#", "*") for name in names))
    return [form for form in forms if "*" in form and not form.endswith("*")] or forms
