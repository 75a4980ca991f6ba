"""What the device's times say of an attachment, in sentences: the plan, and the reads that copies delayed."""

from __future__ import annotations

from collections.abc import Sequence

from ds_fgoffload.stats import Measured, Planned, ReadDelay, RoundStats, shown
from ds_fgoffload.text.names import families, shape
from ds_fgoffload.text.sizes import human


def sentences(rounds: RoundStats) -> list[str]:
    """None if nothing was measured, as on a device without streams."""
    plan = (
        []
        if rounds.planned is None
        else [plan_sentence(rounds.planned) + "; the table counts the rounds before it, too"]
    )
    if rounds.planned is not None and rounds.planned.verdict is not None:
        plan = [rounds.planned.verdict]
    elif rounds.measured is not None:
        plan.append(measured_sentence(rounds.measured))
    return plan + _read_sentences(rounds.reads)


def plan_sentence(planned: Planned) -> str:
    """One sentence."""
    peak = ""
    if planned.peak_bytes is not None and planned.freed_bytes is not None:
        peak = f", the peak falls by {human(planned.freed_bytes)} to {human(planned.peak_bytes)}"
    return (
        f"planned: {human(planned.copied_bytes)} of {human(planned.saved_bytes)} a round are copied{peak}, "
        f"compute waits {planned.stalled_ms:.1f} of {planned.length_ms:.1f} ms"
    )


def measured_sentence(measured: Measured) -> str:
    """One sentence: what was measured of a round, and by how much that is more than the plan foresaw."""
    more_ms = measured.stalled_ms - measured.foreseen_stalled_ms
    return (
        f"measured in a round: {human(measured.saved_bytes)} saved "
        f"({_more(measured.saved_bytes, measured.foreseen_saved_bytes)} than foreseen), peak "
        f"{human(measured.peak_bytes)} ({_more(measured.peak_bytes, measured.foreseen_peak_bytes)}), compute waited "
        f"{measured.stalled_ms:.1f} ms ({more_ms / max(measured.length_ms, 1e-3):+.1%} of the round)"
    )


def _more(found: float, foreseen: float) -> str:
    return f"{found / foreseen - 1:+.1%}" if foreseen else "unforeseen"


def _read_sentences(reads: Sequence[ReadDelay]) -> list[str]:
    """A sentence for each place, where places that differ by the layers' numbers are one."""
    alike: dict[tuple[str | None, str | None, bool], list[ReadDelay]] = {}
    for read in reads:
        key = (_shape(read.after_unit), _shape(read.before_unit), read.after_unit == read.before_unit)
        alike.setdefault(key, []).append(read)
    return [f"the device was read {_where(found)}: {_cost(found)}" for found in alike.values()]


def _shape(unit: str | None) -> str | None:
    return None if unit is None else shape(unit)


def _where(reads: Sequence[ReadDelay]) -> str:
    after = _units([read.after_unit for read in reads])
    before = _units([read.before_unit for read in reads])
    if reads[0].after_unit is None:
        return f"before {before or 'any unit'}"
    if reads[0].before_unit is None:
        return f"after {after}"
    within = reads[0].after_unit == reads[0].before_unit
    return f"within {after}" if within else f"between {after} and {before}"


def _units(names: Sequence[str | None]) -> str:
    distinct = dict.fromkeys(name for name in names if name is not None)
    return ", ".join(map(shown, families(distinct)))


def _cost(reads: Sequence[ReadDelay]) -> str:
    known = [read for read in reads if read.rounds]
    if not known:
        return "how long copies kept it waiting is not clear yet"
    mean_ms = sum(read.waited_ms / read.rounds for read in known)
    last_ms = sum(read.last_waited_ms for read in known)
    return f"copies kept it waiting {mean_ms:.1f} ms a round, {last_ms:.1f} ms in the last that was looked at"
