"""How ``ds-fgoffload inspect`` shows an inspection: a tree with one row for what repeats, tables of patterns, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ds_fgoffload.cli.inspect import Inspection, LeastBytes
from ds_fgoffload.config import SECTION
from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.inspection.inventory import Inventory, StorageRecord, producers
from ds_fgoffload.inspection.suggest import Candidate, Suggestion, candidates, suggest
from ds_fgoffload.selection.patterns import select
from ds_fgoffload.text.names import families
from ds_fgoffload.text.sizes import human

_MOST_PATTERNS = 12
_MOST_PRODUCERS = 3


@dataclass
class Node:
    """A module in the tree; modules that differ by their layer's number only are one node."""

    part: str
    classes: dict[str, None] = field(default_factory=dict)
    modules: int = 0
    own: list[StorageRecord] = field(default_factory=list)
    below: list[StorageRecord] = field(default_factory=list)
    """Own and those of the modules inside."""
    children: dict[str, Node] = field(default_factory=dict)


def tree(inventory: Inventory) -> Node:
    """The root's node."""
    root = Node("(whole model)")
    records = inventory.by_module()
    for abbreviation, names in families(inventory.classes).items():
        own = [record for name in names for record in records.get(name, ())]
        node = root
        node.below.extend(own)
        for part in _parts(abbreviation) if abbreviation else ():
            node = node.children.setdefault(part, Node(part))
            node.below.extend(own)
        node.own.extend(own)
        node.modules += len(names)
        node.classes.update(dict.fromkeys(inventory.classes[name] for name in names))
    return root


def asked_for(
    inspection: Inspection, patterns: Sequence[str], least: LeastBytes
) -> tuple[list[Candidate], OffloadConfigError | None]:
    """The patterns of the command line, and the section that the script came with as a whole.

    Beside them, what is wrong with the first pattern that selects nothing.
    """
    found: list[Candidate] = []
    wrong: OffloadConfigError | None = None
    for pattern in patterns:
        candidate = _candidate(pattern, inspection, [pattern], (), least)
        if isinstance(candidate, Candidate):
            found.append(candidate)
        else:
            wrong = wrong or candidate
    section: Mapping[str, Any] = inspection.section or {}
    if section.get("modules"):
        whole = f"the script's {SECTION} section"
        candidate = _candidate(whole, inspection, section["modules"], section.get("exclude", ()), least)
        if isinstance(candidate, Candidate):  # of what is wrong with it training says it better
            found.append(candidate)
    return found, wrong


def _candidate(
    title: str, inspection: Inspection, modules: Sequence[str], exclude: Sequence[str], least: LeastBytes
) -> Candidate | OffloadConfigError:
    try:
        chosen = select(inspection.root, modules, exclude)
    except OffloadConfigError as error:
        return error
    moves = inspection.inventory.moves(chosen.units, chosen.excluded, least.size_bytes)
    return Candidate(title, frozenset(chosen.units), moves)


def show(inspection: Inspection, asked: Sequence[Candidate], least: LeastBytes, depth: int | None) -> RenderableType:
    """All that a person is told."""
    inventory = inspection.inventory
    min_tensor_bytes, source = least
    parts: list[RenderableType] = [_headline(inspection), _tree_table(tree(inventory), depth)]
    if inspection.incomplete:  # what a pattern would move of a part says nothing about the whole
        return Group(*parts, Text(f"INCOMPLETE: {inspection.incomplete}; modules after that are not in the table."))
    parts.append(Text(f"Storages under {human(min_tensor_bytes)} stay (min_tensor_bytes, {source}).\n"))
    if asked:
        parts.append(_patterns_table("these patterns", asked))
    choice = candidates(inspection.root, inventory, min_tensor_bytes)
    parts.append(_patterns_table("what each pattern would move, per micro-batch", choice[:_MOST_PATTERNS]))
    found = suggest(inspection.root, inventory, min_tensor_bytes)
    parts.extend(_suggestion(s, inventory, min_tensor_bytes) for s in found)
    if not found:
        parts.append(Text("Nothing here can be freed by offloading: " + _why_nothing(inventory, min_tensor_bytes)))
    return Group(*parts)


def as_json(inspection: Inspection, asked: Sequence[Candidate], least: LeastBytes) -> str:
    """The same facts, and every storage."""
    min_tensor_bytes = least.size_bytes
    inventory = inspection.inventory
    choice = [*candidates(inspection.root, inventory, min_tensor_bytes), *asked]
    return json.dumps(
        {
            "inspected": inspection.what,
            "incomplete": inspection.incomplete,
            "forward_ms": inventory.forward_ms,
            "eligible_bytes": inventory.eligible_bytes,
            "min_tensor_bytes": min_tensor_bytes,
            "min_tensor_bytes_from": least.source,
            "modules": {
                name: {
                    "class": inventory.classes[name],
                    "calls": inventory.calls[name],
                    "bytes": sum(record.size_bytes for record in records),
                    "storages": len(records),
                    "producers": producers(records),
                }
                for name, records in inventory.by_module().items()
            },
            "storages": [record.as_dict() for record in inventory.records],
            "patterns": {c.pattern: asdict(c.moves) for c in choice},
            "suggestions": [
                {"title": s.title, SECTION: _section(s, min_tensor_bytes), **asdict(s.moves)}
                for s in suggest(inspection.root, inventory, min_tensor_bytes)
            ],
        },
        indent=2,
    )


def _parts(abbreviation: str) -> list[str]:
    """Split at dots, but not at those of ``{0..31}``."""
    return [part.replace("\0", "..") for part in abbreviation.replace("..", "\0").split(".")]


def _headline(inspection: Inspection) -> RenderableType:
    inventory = inspection.inventory
    stays = sum(record.size_bytes for record in inventory.records if record.skip is not None)
    held = sum(record.size_bytes for record in inventory.records if record.held)
    saves = "a part of one micro-batch saved" if inspection.incomplete else "one micro-batch saves"
    text = (
        f"{inspection.what}: {saves} {human(inventory.eligible_bytes)} for backward in "
        f"{len(inventory.records)} storages, parameters aside"
    )
    text += f"; {human(held)} are held by others as well, so copying them frees nothing" if held else ""
    text += f"; {human(stays)} cannot be moved" if stays else ""
    return Text(text)


def _tree_table(root: Node, depth: int | None) -> Table:
    table = Table(title="saved for backward, by module", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("module", no_wrap=True)
    for name in ("bytes", "%", "storages", "median"):
        table.add_column(name, justify="right")
    table.add_column("written by", overflow="fold")
    for name in ("lifetime", "shared", "held"):
        table.add_column(name, justify="right")
    whole = sum(record.size_bytes for record in root.below)
    _add_rows(table, root, "", whole, depth)
    table.caption = (
        "bytes with all that lies inside; written by: the operation that made what the module itself saved; lifetime: "
        "median from save to first use; shared: saved by several modules; held: by something besides autograd"
    )
    table.caption_justify = "left"
    return table


def _add_rows(table: Table, node: Node, indent: str, whole: int, depth: int | None) -> None:
    sizes = [record.size_bytes for record in node.below]
    classes = ", ".join(node.classes)
    label = Text(f"{indent}{node.part}")
    label.append(f"  {classes}" if classes else "", style="dim")
    label.append(f" x{node.modules}" if node.modules > 1 else "", style="dim")
    lifetimes = [record.lifetime_ms for record in node.own if record.lifetime_ms is not None]
    table.add_row(
        label,
        human(sum(sizes)),
        f"{100 * sum(sizes) / whole:.0f}" if whole else "-",
        str(len(sizes)),
        human(int(median(sizes))) if sizes else "-",
        _written_by(node.own),
        f"{median(lifetimes):.0f} ms" if lifetimes else "-",
        _size_if(record.size_bytes for record in node.below if record.shared),
        _size_if(record.size_bytes for record in node.below if record.held),
    )
    if depth is None or depth > 0:
        for child in node.children.values():
            if child.below:
                _add_rows(table, child, indent + "  ", whole, None if depth is None else depth - 1)


def _size_if(sizes: Any) -> str:
    total = sum(sizes)
    return human(total) if total else "-"


def _written_by(records: Sequence[StorageRecord]) -> str:
    sizes = producers(records)
    names = [name.strip("_") for name in sizes]
    more = f" +{len(names) - _MOST_PRODUCERS}" if len(names) > _MOST_PRODUCERS else ""
    return ", ".join(names[:_MOST_PRODUCERS]) + more


def _patterns_table(title: str, choice: Sequence[Candidate]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("pattern", overflow="fold")
    for name in ("modules", "copies", "moves", "frees", "average copy"):
        table.add_column(name, justify="right")
    for c in choice:
        average = c.moves.moved_bytes // max(1, c.moves.storages)
        table.add_row(
            Text(c.pattern),
            str(len(c.units)),
            str(c.moves.storages),
            human(c.moves.moved_bytes),
            human(c.moves.freed_bytes),
            human(average),
        )
    return table


def _section(suggestion: Suggestion, min_tensor_bytes: int) -> dict[str, Any]:
    section: dict[str, Any] = {"modules": list(suggestion.modules)}
    if min_tensor_bytes != 1 << 20:
        section["min_tensor_bytes"] = _as_written(min_tensor_bytes)
    return section


def _as_written(size_bytes: int) -> int | str:
    for power, suffix in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes and size_bytes % (1 << 10 * power) == 0:
            return f"{size_bytes >> 10 * power}{suffix}"
    return size_bytes


def _suggestion(suggestion: Suggestion, inventory: Inventory, min_tensor_bytes: int) -> RenderableType:
    moves = suggestion.moves
    share = 100 * moves.freed_bytes / max(1, inventory.eligible_bytes)
    text = Text(f"\nSuggestion, {suggestion.title}: frees {human(moves.freed_bytes)} ({share:.0f}%) per micro-batch, ")
    text.append(f"in {moves.storages} copies")
    body = json.dumps({SECTION: _section(suggestion, min_tensor_bytes)}, indent=2)
    return Group(text, Syntax(body, "json", background_color="default"))


def _why_nothing(inventory: Inventory, min_tensor_bytes: int) -> str:
    large = [r for r in inventory.records if r.skip is None and r.size_bytes >= min_tensor_bytes]
    if not large:
        largest = max((r.size_bytes for r in inventory.records), default=0)
        return (
            f"the largest storage is {human(largest)} and min_tensor_bytes is {human(min_tensor_bytes)}; lower it "
            "(--min-tensor-bytes), or inspect with the batch that you train with"
        )
    return "something besides autograd holds every storage"
