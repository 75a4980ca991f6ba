"""Writes docs/configuration.md from the docstrings of the configuration's fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ds_fgoffload.config import SECTION, FineGrainedOffloadConfig, HostPoolConfig

PAGE = Path(__file__).parent / "configuration.md"

INTRODUCTION = f"""# Configuration

The section `{SECTION}` of ds_config.json. Made from the fields in `ds_fgoffload/config.py` by
`python docs/make_configuration.py`.

Sizes are bytes or text such as `"64MiB"`. A key that is left out has its default; where that is *automatic*, leave it
out: Accelerate (and so the Trainer) takes the word `"auto"` inside a nested section for one of its own and refuses it.
That holds for `policy: "auto"` as well, which is the default; every other key refuses the word in any case.
Unknown keys and bad values are refused, with the section, the key, what was got and what is allowed.

```json
{json.dumps({SECTION: {"modules": ["model.layers.*.mlp"], "exclude": ["model.layers.0"]}}, indent=2)}
```
"""


def page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION, *_entries(FineGrainedOffloadConfig, ""), *_entries(HostPoolConfig, "host_pool.")]
    return "\n".join(parts)


def _entries(model: type[BaseModel], prefix: str) -> list[str]:
    entries = []
    for name, field in model.model_fields.items():
        if name == "host_pool":
            continue
        description = " ".join((field.description or "").split())
        entries.append(f"### `{prefix}{name}`\n\n{description}\n\nDefault: {_shown(field.default)}\n")
    return entries


def _shown(default: Any) -> str:
    if default is None:
        return "automatic, or none where the text says so"
    return "none, it is required" if default is PydanticUndefined else f"`{json.dumps(default)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
