"""The table of what was moved: counts of all ranks in, text out."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_fgoffload.host_memory.pool import HostPoolStats
from ds_fgoffload.saved.eligibility import TOO_SMALL
from ds_fgoffload.stats import OffloadStats, UnitStats, add_up, rate_gb_s, shown
from ds_fgoffload.text.names import families
from ds_fgoffload.text.sentences import sentences
from ds_fgoffload.text.sizes import human

_WIDTH = 400  # room for any name; the table takes no more than it needs
_BYTES_COLUMNS = ("saved", "offloaded", "reloaded", "in place", "held", "kept")
_TIMES_COLUMNS = ("stalled", "GB/s out", "GB/s in")


@dataclass(frozen=True)
class RankCounts:
    """What one rank counted."""

    rank: int
    offload: OffloadStats
    pool: HostPoolStats

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        units = {name: _plain(stats) for name, stats in self.offload.units.items()}
        pool = {f"pool_{name}": value for name, value in asdict(self.pool).items()}
        return {"rank": self.rank, **_plain(self.offload), "units": units, **pool}


def render(ranks: Sequence[RankCounts], *, expand: bool = False) -> str:
    """The table, and a sentence about each unit that did nothing useful.

    Units that differ by their layer's number are one row, summed over the ranks that have them; a row of sums for each
    rank follows. With ``expand`` each unit of each rank has a row.
    """
    table = Table(title="fine_grained_offload: bytes since attaching", title_justify="left")
    shows = _Columns(
        recomputed=any(counts.offload.recomputed_bytes for counts in ranks),
        times=any(counts.offload.timed_out_bytes for counts in ranks),
    )
    for name in ("rank", "unit", "calls", *shows.names()):
        table.add_column(name, justify="left" if name in ("rank", "unit") else "right")
    if not expand:
        for family in _families(ranks):
            table.add_row(
                _numbers(family.ranks),
                Text(family.name),
                str(family.stats.calls),
                *shows.cells(family.stats),
            )
        table.add_section()
    for counts in ranks:
        if expand:
            for unit, stats in counts.offload.units.items():
                table.add_row(str(counts.rank), Text(shown(unit)), str(stats.calls), *shows.cells(stats))
        sums = [str(counts.rank), "all units", "", *shows.cells(counts.offload)]
        table.add_row(*sums, style="bold", end_section=expand)
    console = Console(file=io.StringIO(), width=_WIDTH)
    console.print(table)
    for line in _remarks(ranks):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


@dataclass(frozen=True)
class _Columns:
    """Those that follow the calls; some are there only where there is something to tell."""

    recomputed: bool
    times: bool

    def names(self) -> list[str]:
        return [*_BYTES_COLUMNS, *["recomputed"] * self.recomputed, "late", *_TIMES_COLUMNS * self.times]

    def cells(self, stats: UnitStats | OffloadStats) -> list[str]:
        sizes_bytes = [
            stats.saved_bytes,
            stats.offloaded_bytes,
            stats.reloaded_bytes,
            stats.used_in_place_bytes,
            stats.held_bytes,
            stats.kept_bytes,
            *[stats.recomputed_bytes] * self.recomputed,
        ]
        times = [
            f"{stats.stalled_ms:.1f} ms" if stats.stalled_ms else "-",
            _rate(stats.timed_out_bytes, stats.copying_out_ms),
            _rate(stats.timed_in_bytes, stats.copying_in_ms),
        ]
        sizes = (human(size_bytes) if size_bytes else "-" for size_bytes in sizes_bytes)
        return [*sizes, str(stats.late_reloads or "-"), *times * self.times]


def _rate(size_bytes: int, took_ms: float) -> str:
    rate = rate_gb_s(size_bytes, took_ms)
    return "-" if rate is None else f"{rate:.1f}"


@dataclass
class _Family:
    """Units that differ by their layer's number only, on all ranks that have them."""

    name: str
    ranks: list[int]
    stats: UnitStats


def _families(ranks: Sequence[RankCounts]) -> list[_Family]:
    names = list(dict.fromkeys(name for counts in ranks for name in counts.offload.units))
    found = []
    for name, members in families(names).items():
        having = [counts for counts in ranks if any(member in counts.offload.units for member in members)]
        every = [units[m] for units in (counts.offload.units for counts in having) for m in members if m in units]
        stats = UnitStats(calls=sum(unit.calls for unit in every))
        add_up(stats, every)
        found.append(_Family(shown(name), [counts.rank for counts in having], stats))
    return found


def _numbers(ranks: Sequence[int]) -> str:
    """``0-7`` where no rank is left out, else all of them."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _plain(stats: UnitStats | OffloadStats) -> dict[str, Any]:
    # not dataclasses.asdict: it makes a Counter of (key, value) pairs out of a Counter
    plain = {**vars(stats), "skipped": dict(stats.skipped)}
    if isinstance(stats, OffloadStats):
        plain["rounds"] = asdict(stats.rounds)
    return plain


def _remarks(ranks: Sequence[RankCounts]) -> list[str]:
    remarks = []
    for counts in ranks:
        pool = counts.pool
        remarks.append(
            f"rank {counts.rank}: host pool {human(pool.pinned_bytes)} pinned, "
            f"peak {human(counts.offload.peak_host_bytes)} leased, limit {human(pool.limit_bytes)}; "
            f"{human(counts.offload.live_host_bytes)} on the host now"
        )
        if counts.offload.skipped:
            reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.offload.skipped.items()))
            remarks.append(f"rank {counts.rank}: saved tensors left on the device, by reason: {reasons}")
        if counts.offload.recomputations:
            remarks.append(
                f"rank {counts.rank}: {counts.offload.recomputations} calls recomputed in backward, "
                f"{counts.offload.recompute_ms:.0f} ms on the device"
            )
        remarks += [f"rank {counts.rank}: {sentence}" for sentence in sentences(counts.offload.rounds)]
    return remarks + _idle_units(ranks)


def _idle_units(ranks: Sequence[RankCounts]) -> list[str]:
    units: dict[str, list[UnitStats]] = {}
    for counts in ranks:
        for name, stats in counts.offload.units.items():
            units.setdefault(name, []).append(stats)
    faults: dict[_Fault, list[str]] = {}
    for name, all_stats in units.items():
        for fault in _faults(all_stats):
            faults.setdefault(fault, []).append(name)
    return [
        f"unit{'' if len(names) == 1 else 's'} {', '.join(map(shown, families(names)))}"
        f"{fault.of_one if len(names) == 1 else fault.of_several}"
        for fault, names in faults.items()
    ]


class _Fault(NamedTuple):
    """What follows the name of a unit, or the names of several."""

    of_one: str
    of_several: str


def _faults(all_stats: Sequence[UnitStats]) -> list[_Fault]:
    """What is to be said of a unit, given its counts on every rank that has it."""
    found = []
    saved = sum(stats.saved_bytes for stats in all_stats)
    offloaded = sum(stats.offloaded_bytes for stats in all_stats)
    held = sum(stats.held_bytes for stats in all_stats)
    skipped = sum((stats.skipped for stats in all_stats), Counter[str]())
    if any(stats.unseen_checkpoints for stats in all_stats):
        unseen = (
            ": deepspeed.checkpointing keeps {} inputs where no hook sees them; use "
            "torch.utils.checkpoint.checkpoint with use_reentrant=False instead"
        )
        found.append(_Fault(unseen.format("its"), unseen.format("their")))
    if offloaded and any(stats.recomputed_calls for stats in all_stats):
        made_again = (
            f": {human(offloaded)} were moved that a checkpoint around makes again in backward all the same; to move "
            'what the checkpoints keep, select what is around them, such as "model" in a Hugging Face decoder'
        )
        found.append(_Fault(made_again, made_again))
    found += _faults_of_recomputation(all_stats)
    if any(stats.compiled for stats in all_stats):
        compiled = " saved nothing: {} in a module that torch.compile has compiled"
        found.append(_Fault(compiled.format("it lies"), compiled.format("they lie")))
    elif not any(stats.calls for stats in all_stats):
        uncalled = " saved nothing: {} " + (
            "only called in reentrant checkpoints (use_reentrant=False offloads instead of recomputing)"
            if any(stats.recomputed_calls for stats in all_stats)
            else "never called with gradients enabled, or only by compiled code"
        )
        found.append(_Fault(uncalled.format("it was"), uncalled.format("they were")))
    elif not saved and not any(stats.recompute for stats in all_stats):
        remedy = "; storages below min_tensor_bytes stay: lower it" if skipped[TOO_SMALL] else ""
        reasons = ", ".join(f"{reason} {n}" for reason, n in skipped.items())
        whys = [reasons or f"nothing in {unit} saves tensors for backward" for unit in ("it", "them")]
        found.append(_Fault(*(f" saved nothing that may be offloaded ({why}){remedy}" for why in whys)))
    elif offloaded and held == offloaded:
        freed = " freed nothing: something else held every storage until backward"
        found.append(_Fault(freed, freed))
    return found


def _faults_of_recomputation(all_stats: Sequence[UnitStats]) -> list[_Fault]:
    refusal = next((stats.recompute_refused for stats in all_stats if stats.recompute_refused), "")
    if refusal:
        return [_Fault(f" is not recomputed: {refusal}", f" are not recomputed: {refusal}")]
    if any(stats.recompute and stats.calls and not stats.recomputations for stats in all_stats):
        return [
            _Fault(
                " was never recomputed: somebody else (a checkpoint, say) takes what it saves, it lies in another unit "
                "under recompute, or backward needs nothing that it gives",
                " were never recomputed: somebody else (a checkpoint, say) takes what they save, they lie in other "
                "units under recompute, or backward needs nothing that they give",
            )
        ]
    return []
