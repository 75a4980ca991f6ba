"""How ``ds-fgoffload plan`` shows plans: tables, JSON and a picture of the curve."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ds_fgoffload.cli.plan import Found, rate
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.planning.what_if import CurvePoint, SavedPlace, Treatment, UnitDifference, WhatIf, differences
from ds_fgoffload.stats import Planned, shown
from ds_fgoffload.text.names import families
from ds_fgoffload.text.sentences import plan_sentence
from ds_fgoffload.text.sizes import human

PICTURES = (".svg", ".png")
_GREY = "#8b949e"  # stands out from white and from black
_COLOURS = ("#2da44e", "#bf8700")


def show(found: Found, *, expand: bool) -> RenderableType:
    """All that a person is told of one plan."""
    parts: list[RenderableType] = [
        _headline(found),
        *_remarks(found.plan),
        _units_table(found.plan, expand=expand),
        _curve_table(found.plan),
    ]
    return Group(*parts)


def show_both(one: Found, other: Found, *, expand: bool) -> RenderableType:
    """Two plans side by side, and the units of which they move different parts."""
    parts: list[RenderableType] = []
    for found in (one, other):
        parts += [_headline(found), *_remarks(found.plan)]
    differing = list(differences(one.plan, other.plan))
    parts.append(_comparison_table(one, other))
    parts.append(
        _differences_table(differing, expand=expand)
        if differing
        else Text("Both move the same of each unit, and recompute the same units.")
    )
    return Group(*parts)


def as_json(found: Found) -> str:
    """The same facts, and every place."""
    return json.dumps(_plain(found), indent=2)


def both_as_json(one: Found, other: Found) -> str:
    """Two plans, and the units that they treat differently."""
    differing = [
        {
            "unit": each.unit,
            "moved_bytes": each.moved_bytes,
            "saved_bytes": each.saved_bytes,
            "recomputed": each.recomputed,
        }
        for each in differences(one.plan, other.plan)
    ]
    return json.dumps({"plans": [_plain(one), _plain(other)], "differences": differing}, indent=2)


def draw(plans: Sequence[Found], path: Path) -> None:
    """Writes the curves: memory freed against time added.

    Raises:
        OffloadStateError: there is no matplotlib, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise OffloadStateError(
            "--picture needs the package matplotlib: pip install matplotlib, or ds_fgoffload[docs]"
        ) from None
    grey = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _GREY)
    largest = max(point.freed_bytes for found in plans for point in found.plan.curve)
    unit_bytes, unit = next(
        ((1 << power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if largest >= 1 << power),
        (1, "bytes"),
    )
    with mpl.rc_context({"svg.hashsalt": "plan", "svg.fonttype": "none", **grey}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for found, colour in zip(plans, _COLOURS, strict=False):
            curve, plan = found.plan.curve, found.plan
            added = [100 * point.added for point in curve]
            freed = [point.freed_bytes / unit_bytes for point in curve]
            axes.plot(added, freed, color=colour, marker="o", drawstyle="steps-post", label=found.title)
            axes.plot([100 * plan.added], [plan.freed_bytes / unit_bytes], color=colour, marker="*", markersize=14)
        axes.plot([], [], color=_GREY, marker="*", markersize=10, linestyle="", label="as set")
        axes.set_xlabel("time added to a round, %")
        axes.set_ylabel(f"peak memory freed, {unit}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, transparent=True, dpi=150)
        except OSError as error:
            raise OffloadStateError(
                f"{path} cannot be written: {error.strerror or error}; give another path"
            ) from error


def _headline(found: Found) -> Text:
    model, plan = found.file.model, found.plan
    rank = f", rank {found.file.rank} of {model.ranks}" if model.ranks > 1 else ""
    if plan.size:
        size = f"micro-batches of {plan.size} tokens or elements"
    else:
        size = "rounds of several micro-batches, as they came"
    seen = f" (seen: {plan.known_sizes[0]} to {plan.known_sizes[1]})" if plan.known_sizes else ""
    return Text(
        f"{found.title}: {model.model_class}, {model.engine}{rank}, {found.file.machine.device}; {size}{seen}",
        style="bold",
    )


def _remarks(plan: WhatIf) -> Iterator[Text]:
    yield Text(plan_sentence(_planned(plan)))
    yield Text(
        f"link: {_percent(plan.link_out)} of {rate(plan.d2h_bytes_per_ms)} out, "
        f"{_percent(plan.link_in)} of {rate(plan.h2d_bytes_per_ms)} in"
    )
    if plan.verdict is not None:
        yield Text(plan.verdict, style="yellow")
    if not plan.fits:
        over_bytes = plan.peak_bytes - plan.room_bytes
        yield Text(
            f"DOES NOT FIT: the peak is {human(over_bytes)} above the {human(max(0, plan.room_bytes))} that a round "
            f"has of a device of {human(plan.settings.device_bytes)}",
            style="red",
        )
    if plan.is_beyond:
        yield Text(
            "no round of this size was seen: times and sizes are extrapolated in proportion, also for attention, whose "
            "time grows faster",
            style="yellow",
        )


def _planned(plan: WhatIf) -> Planned:
    return Planned(
        plan.moved_bytes,
        saved_bytes=plan.saved_bytes,
        stalled_ms=plan.added_ms,
        length_ms=plan.length_ms,
        peak_bytes=plan.peak_bytes,
        peak_without_bytes=plan.peak_without_bytes,
    )


def _groups(units: Iterable[str], *, expand: bool) -> dict[str, list[str]]:
    names = list(units)
    return {shown(name): [name] for name in names} if expand else {shown(k): v for k, v in families(names).items()}


def _table(title: str, left: str, *right: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(left, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def _units_table(plan: WhatIf, *, expand: bool) -> Table:
    table = _table(
        "what happens to what a round saves", "unit", "saved", "moved", "kept", "held", "leaves, ms", "back, ms", ""
    )
    by_unit: dict[str, list[SavedPlace]] = {}
    for place in plan.places:
        by_unit.setdefault(place.place.site.unit, []).append(place)
    for name, members in _groups(plan.units, expand=expand).items():
        places = [place for member in members for place in by_unit.get(member, ())]
        table.add_row(
            Text(name),
            _size(places),
            *(_size(one for one in places if one.treatment is treatment) for treatment in _TREATMENTS),
            _span(one.leaves_ms for one in places),
            _span(one.comes_back_ms for one in places),
            _word(places, recomputed=sum(member in plan.recomputed for member in members), units=len(members)),
        )
    table.caption = (
        "a round is from its first to its last moment, without waits; leaves: its device memory is given back, back: "
        "the copy back begins; held: something else keeps the memory, a copy would free nothing"
    )
    table.caption_justify = "left"
    return table


_TREATMENTS = (Treatment.MOVED, Treatment.KEPT, Treatment.HELD)


def _word(places: Sequence[SavedPlace], *, recomputed: int, units: int) -> str:
    found = {one.treatment for one in places}
    words = [treatment.value for treatment in _TREATMENTS if treatment in found]
    if recomputed:
        words.insert(0, "recomputed" if recomputed == units else f"{recomputed} of {units} recomputed")
    return ", ".join(words) or "saves nothing"


def _size(places: Iterable[SavedPlace]) -> str:
    size_bytes = sum(one.size_bytes for one in places)
    return human(size_bytes) if size_bytes else "-"


def _span(times_ms: Iterable[float | None]) -> str:
    known = sorted(time_ms for time_ms in times_ms if time_ms is not None)
    if not known:
        return "-"
    first, last = f"{known[0]:.1f}", f"{known[-1]:.1f}"
    return first if first == last else f"{first} to {last}"


def _curve_table(plan: WhatIf) -> Table:
    table = _table(
        "what time buys: plans without a target", "max_overhead", "freed", "peak", "added", "% of the round", "moved"
    )
    for point in plan.curve:
        table.add_row(
            _allowed(point),
            human(point.freed_bytes),
            human(point.peak_bytes),
            f"{point.added_ms:.1f} ms",
            f"{100 * point.added:.1f}",
            human(point.moved_bytes),
        )
    return table


def _allowed(point: CurvePoint) -> str:
    allowed = "any" if point.max_overhead is None else f"{point.max_overhead:g}"
    return allowed if point.set_to == point.max_overhead else f"{allowed} (better with {point.set_to:g})"


def _comparison_table(one: Found, other: Found) -> Table:
    first = one.title
    second = other.title
    if first == second:  # of two folders
        first, second = str(one.path), str(other.path)
    table = _table("the two plans", "", first, second, "difference")
    for name, value, tell in _ROWS:
        here, there = value(one.plan), value(other.plan)
        difference = tell(abs(there - here))
        sign = "" if difference == tell(0) else "+" if there > here else "-"
        table.add_row(name, tell(here), tell(there), f"{sign}{difference}")
    return table


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def _bytes(value: float) -> str:
    return human(round(value))


_ROWS: tuple[tuple[str, Callable[[WhatIf], float], Callable[[float], str]], ...] = (
    ("tokens or elements", lambda plan: plan.size, lambda value: f"{value:.0f}"),
    ("peak without", lambda plan: plan.peak_without_bytes, _bytes),
    ("peak", lambda plan: plan.peak_bytes, _bytes),
    ("freed", lambda plan: plan.freed_bytes, _bytes),
    ("moved", lambda plan: plan.moved_bytes, _bytes),
    ("round without waits", lambda plan: plan.length_ms, lambda value: f"{value:.1f} ms"),
    ("added", lambda plan: plan.added_ms, lambda value: f"{value:.1f} ms"),
    ("added, of the round", lambda plan: plan.added, _percent),
    ("link out, rate", lambda plan: plan.d2h_bytes_per_ms, rate),
    ("link out, use", lambda plan: plan.link_out, _percent),
    ("link in, rate", lambda plan: plan.h2d_bytes_per_ms, rate),
    ("link in, use", lambda plan: plan.link_in, _percent),
)


def _differences_table(differing: Sequence[UnitDifference], *, expand: bool) -> Table:
    table = _table("units that are treated differently", "unit", "first", "second")
    by_unit = {each.unit: each for each in differing}
    for name, members in _groups(by_unit, expand=expand).items():
        table.add_row(Text(name), *(_moved_of([by_unit[member] for member in members], n) for n in (0, 1)))
    return table


def _moved_of(found: Sequence[UnitDifference], number: int) -> str:
    moved = sum(each.moved_bytes[number] for each in found)
    saved = sum(each.saved_bytes[number] for each in found)
    recomputed = "recomputed, " if all(each.recomputed[number] for each in found) else ""
    return f"{recomputed}{human(moved)} of {human(saved)} moved"


def _plain(found: Found) -> dict[str, Any]:
    file, plan = found.file, found.plan
    goal, link = plan.settings.goal, plan.settings.link
    return {
        "file": str(found.path),
        "written_at": file.written_at,
        "model": file.model.model_class,
        "engine": file.model.engine,
        "rank": file.rank,
        "ranks": file.model.ranks,
        "device": file.machine.device,
        "settings": {
            "max_overhead": goal.max_overhead,
            "target_saved_bytes": goal.target_saved_bytes,
            "device_memory_bytes": plan.settings.device_bytes,
            "link_bytes_per_s": None if link.bytes_per_ms is None else 1000 * link.bytes_per_ms,
            "link_times": link.times,
            "tokens": plan.settings.size,
        },
        "tokens": plan.size or None,
        "known_tokens": plan.known_sizes,
        "length_ms": plan.length_ms,
        "added_ms": plan.added_ms,
        "added": plan.added,
        "peak_without_bytes": plan.peak_without_bytes,
        "peak_bytes": plan.peak_bytes,
        "freed_bytes": plan.freed_bytes,
        "room_bytes": plan.room_bytes,
        "fits": plan.fits,
        "verdict": plan.verdict,
        "saved_bytes": plan.saved_bytes,
        "moved_bytes": plan.moved_bytes,
        "link": {
            "out": {"bytes_per_s": 1000 * plan.d2h_bytes_per_ms, "use": plan.link_out},
            "in": {"bytes_per_s": 1000 * plan.h2d_bytes_per_ms, "use": plan.link_in},
        },
        "units": {unit: _unit(plan, unit) for unit in plan.units},
        "places": [_place(one) for one in plan.places],
        "curve": [
            {
                "max_overhead": point.max_overhead,
                "set_to": point.set_to,
                "freed_bytes": point.freed_bytes,
                "peak_bytes": point.peak_bytes,
                "moved_bytes": point.moved_bytes,
                "added_ms": point.added_ms,
                "added": point.added,
            }
            for point in plan.curve
        ],
    }


def _unit(plan: WhatIf, unit: str) -> dict[str, Any]:
    places = plan.of_unit(unit)
    sizes = {
        f"{treatment.value}_bytes": sum(one.size_bytes for one in places if one.treatment is treatment)
        for treatment in _TREATMENTS
    }
    return {
        "saved_bytes": sum(one.size_bytes for one in places),
        **sizes,
        "recomputed": unit in plan.recomputed,
    }


def _place(one: SavedPlace) -> dict[str, Any]:
    return {
        "micro_batch": one.place.ordinal,
        "unit": one.place.site.unit,
        "call": one.place.site.call,
        "save": one.place.site.save,
        "bytes": one.size_bytes,
        "treatment": one.treatment.value,
        "saved_ms": one.saved_ms,
        "leaves_ms": one.leaves_ms,
        "comes_back_ms": one.comes_back_ms,
        "needed_ms": one.needed_ms,
    }
