"""Draws memory freed against time added, from benchmarks/results, for light and dark pages: ``docs/on_time.svg``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.tables import PLOT, READS, ROOT, load

GREY = "#8b949e"  # stands out from white and from black
TICKS = (0, 2, 5, 10, 20, 50, 200, 1000)
OFFSETS = (0, 14, -14, 28, -28)
COLOURS = {"ours": "#2da44e", "megatron": "#bf8700", "others": "#a371f7"}


def points(figures: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """(kind, name, per cent of time added, GiB of max reserved freed) of every mode, routers without reads."""
    found = []
    for name, mode in figures["modes"].items():
        if name == "plain" or name.endswith(READS) or "freed_reserved_gib" not in mode:
            continue
        kind = name.split()[0] if name.split()[0] in COLOURS else "others"
        found.append((kind, name, 100 * mode["added_time"], mode["freed_reserved_gib"]))
    return found


def label(axes: Axes, found: list[tuple[str, str, float, float]]) -> None:
    """Writes the names beside the points, each where none has been written yet."""
    dots = [axes.transData.transform(point[2:]) for point in found]
    taken = [(x - 6, x + 6, y) for x, y in dots]  # left, right and height
    for kind, name, added, freed in sorted(found, key=lambda point: point[2:]):
        x, y = axes.transData.transform((added, freed))
        left, right = x + 7, x + 7 + 7 * len(name)
        free = (
            dy for dy in OFFSETS if all(right < a or left > b or abs(y + dy - height) > 13 for a, b, height in taken)
        )
        dy = next(free, OFFSETS[0])
        taken.append((left, right, y + dy))
        offset = (7, dy * 0.72 - 3)  # dots in points
        axes.annotate(name, (added, freed), offset, textcoords="offset points", color=COLOURS[kind], fontsize=9)


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
        found = points(figures)
        for kind, _, added, freed in found:
            axes.scatter(added, freed, color=COLOURS[kind], s=45, zorder=3)
        axes.set_xscale("symlog", linthresh=10, linscale=2)
        axes.margins(x=0.14, y=0.14)
        axes.set_xticks([tick for tick in TICKS if tick <= 1.2 * max((added for *_, added, _ in found), default=0)])
        axes.minorticks_off()
        label(axes, found)
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
