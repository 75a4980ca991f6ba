"""Draws memory freed against time added, from benchmarks/results, for light and dark pages: ``docs/on_time.svg``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.tables import PLOT, READS, ROOT, load

GREY = "#8b949e"  # stands out from white and from black
COLOURS = {"ours": "#2da44e", "megatron": "#bf8700", "others": "#8250df"}


def points(figures: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """(kind, name, per cent of time added, GiB of max reserved freed) of every mode, routers without reads."""
    found = []
    for name, mode in figures["modes"].items():
        if name == "plain" or name.endswith(READS) or "freed_reserved_gib" not in mode:
            continue
        kind = name.split()[0] if name.split()[0] in COLOURS else "others"
        found.append((kind, name, 100 * mode["added_time"], mode["freed_reserved_gib"]))
    return found


def draw(figures: dict[str, Any], path: Path) -> None:
    """One point a mode; time on a scale that is linear up to 10% and logarithmic from there."""
    settings = {
        "svg.hashsalt": "on_time",  # the same figures make the same file
        "svg.fonttype": "none",
        "font.size": 10,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for kind, name, added, freed in points(figures):
            colour = COLOURS[kind]
            axes.scatter(added, freed, color=colour, s=45, zorder=3)
            axes.annotate(name, (added, freed), (6, 5), textcoords="offset points", color=colour, fontsize=9)
        axes.set_xscale("symlog", linthresh=10, linscale=2)
        axes.margins(x=0.12, y=0.12)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}%")
        axes.set_xlabel("time added to the step")
        axes.set_ylabel("max reserved memory freed, GiB")
        axes.grid(color=GREY, alpha=0.25)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw(load("on_time_deepseek"), ROOT / PLOT)
