"""``ds-fgoffload top``: the host pools of this user's ranks on this node, live."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ds_fgoffload.host_memory.node_ledger import NodeEntry, read_node
from ds_fgoffload.text.sizes import human

_BAR = 20


def alive() -> list[NodeEntry]:
    """Those that are alive now."""
    return read_node()


def watch(console: Console, every_s: float, *, once: bool) -> None:
    """Shows the pools, again every ``every_s`` seconds until the user interrupts, or ``once``."""
    if once or not console.is_terminal:
        console.print(view(alive()))
        return
    with Live(view(alive()), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(view(alive()), refresh=True)
                time.sleep(every_s)
        except KeyboardInterrupt:
            return


def as_json(pools: Sequence[NodeEntry]) -> str:
    """One object for each pool."""
    return json.dumps([asdict(pool) for pool in pools], indent=2)


def view(pools: Sequence[NodeEntry]) -> RenderableType:
    """A row for each pool, the sums, and what the system has left."""
    memory = psutil.virtual_memory()
    available = Text(f"host memory: {human(memory.available)} of {human(memory.total)} available")
    if not pools:
        return Group(available, Text("no host pool of this user is alive on this node"))
    table = Table(title="host pools of this node", title_justify="left", box=SIMPLE_HEAD)
    for name in ("pid", "program", "rank", "pinned", "on lease", "", "limit", "share", "wanted"):
        table.add_column(name, justify="left" if name in {"program", ""} else "right")
    for pool in sorted(pools, key=lambda pool: (pool.name, pool.rank, pool.pid, pool.pool)):
        table.add_row(
            str(pool.pid),
            Text(pool.name or "-"),
            str(pool.rank) if pool.rank >= 0 else "-",
            human(pool.pinned_bytes),
            human(pool.leased_bytes),
            _bar(pool.leased_bytes, pool.pinned_bytes),
            human(pool.limit_bytes),
            human(pool.share_bytes),
            human(pool.wanted_bytes) if pool.wanted_bytes else "-",
        )
    pinned = sum(pool.pinned_bytes for pool in pools)
    leased = sum(pool.leased_bytes for pool in pools)
    sums: list[str | Text] = [
        "",
        f"{len(pools)} in all",
        "",
        human(pinned),
        human(leased),
        _bar(leased, pinned),
        "",
        "",
        "",
    ]
    table.add_row(*sums, style="bold")
    return Group(available, table)


def _bar(part: int, whole: int) -> Text:
    """How much of what is pinned is on lease."""
    full = round(_BAR * min(part, whole) / whole) if whole else 0
    return Text("█" * full, style="cyan").append("░" * (_BAR - full), style="dim")
