"""Writes docs/aliases.md from the table of families."""

from __future__ import annotations

from pathlib import Path

from ds_fgoffload.selection.families import FAMILIES, MEANINGS, Part

PAGE = Path(__file__).parent / "aliases.md"

INTRODUCTION = """# Aliases

`@alias` in `modules` or `exclude` stands for a part of each decoder layer, by the family's own names. Made from
`ds_fgoffload/selection/families.py` by `python docs/make_aliases.py`. The tests build every family of the installed
transformers and check each name.

| alias | means |
|---|---|
"""


def page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION + "\n".join(f"| `@{word}` | {meaning} |" for word, meaning in MEANINGS.items()) + "\n"]
    parts.append(
        "\n## What they become\n\nNames are relative to the layer, `#` is any number, *the layer* is the layer itself. "
        "Where several choices stand in a cell, a layer takes the first that it has; one in *italics* is more than the "
        "alias says, and the log tells why.\n"
    )
    tables: dict[str, list[str]] = {}
    for family, table in FAMILIES.items():
        rows = "\n".join(f"| `@{word}` | {_choices(table[word])} |" for word in MEANINGS if word in table)
        tables.setdefault(rows, []).append(f"`{family}`")
    for rows, families in tables.items():
        parts.append(f"\n### {', '.join(families)}\n\n| alias | modules |\n|---|---|\n{rows}\n")
    return "".join(parts)


def _choices(part: Part) -> str:
    shown = []
    for choice in part:
        text = ", ".join(f"`{path}`" if path else "the layer" for path in choice.paths)
        shown.append(f"*{text}*" if choice.note else text)
    return " or ".join(shown)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
