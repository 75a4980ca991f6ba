"""What was counted: bytes and events per unit, summed for the attachment. Nothing here decides anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

SUMMED = (
    "saved_bytes",
    "offloaded_bytes",
    "reloaded_bytes",
    "kept_bytes",
    "recomputed_bytes",
    "held_bytes",
    "used_in_place_bytes",
    "late_reloads",
    "copying_out_ms",
    "copying_in_ms",
    "timed_out_bytes",
    "timed_in_bytes",
    "stalled_ms",
    "recomputations",
    "recompute_ms",
)


@dataclass
class UnitStats:
    """Counts of one unit since it was attached; every distinct saved storage counts once.

    ``saved_bytes = offloaded_bytes + kept_bytes``, and once all graphs are gone ``offloaded_bytes`` is the sum of
    ``reloaded_bytes``, ``held_bytes``, ``used_in_place_bytes`` and what graphs that nobody ran backward dropped.
    """

    calls: int = 0
    """Scopes opened: calls of the unit with gradients enabled."""
    saved_bytes: int = 0
    """Bytes of the storages saved for backward that were eligible for offloading."""
    offloaded_bytes: int = 0
    """Bytes copied to the host."""
    reloaded_bytes: int = 0
    """Bytes copied back to the device."""
    kept_bytes: int = 0
    """Eligible bytes that stayed on the device: kept by the plan, or because the host pool was full."""
    recomputed_bytes: int = 0
    """Bytes made again in backward instead of being kept."""
    held_bytes: int = 0
    """Bytes copied whose device memory was never freed, because something else held the storage until backward."""
    used_in_place_bytes: int = 0
    """Bytes copied that backward needed before their device memory was due to be released."""
    late_reloads: int = 0
    """Reloads that were begun only when backward already needed the storage."""
    copying_out_ms: float = 0.0
    """Time on the device that the copies to the host took; counted when the round is over, as the next four are."""
    copying_in_ms: float = 0.0
    """Time that the copies back took."""
    timed_out_bytes: int = 0
    """Bytes of the copies to the host whose time is counted; on a device without streams none is."""
    timed_in_bytes: int = 0
    """Bytes of the copies back whose time is counted."""
    stalled_ms: float = 0.0
    """Time for which compute waited for copies."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Saved tensors that were not eligible, by reason."""
    recompute: bool = False
    """It is under ``recompute``."""
    recomputations: int = 0
    """Times that a call of a unit under ``recompute`` was made again in backward."""
    recompute_ms: float = 0.0
    """Device time of that, in milliseconds, as far as the device has come."""
    recompute_refused: str = ""
    """Why a unit under ``recompute`` keeps what it saves all the same; empty: it does not."""
    compiled: bool = False
    """It lies in a module that ``torch.compile`` compiled as a whole, so that its hooks do not run."""
    recomputed_calls: int = 0
    """Calls in the backward of a checkpoint around it; what they save is used at once, and not offloaded."""
    unseen_checkpoints: int = 0
    """Calls of ``deepspeed.checkpointing`` in the unit's first micro-batch: no hook sees what they keep."""


@dataclass(frozen=True)
class Planned:
    """What the present plan is expected to do in a round."""

    copied_bytes: int
    saved_bytes: int
    """Of these ``copied_bytes`` are copied."""
    stalled_ms: float
    """Time for which compute will wait for copies."""
    length_ms: float
    """Of the round that was planned from, without such waits."""
    peak_bytes: int | None = None
    """Highest device memory; None: memory was not asked for, since the plan copies everything anyway."""
    peak_without_bytes: int | None = None
    """The same without offloading."""
    verdict: str | None = None
    """Why offloading does not pay, so that nothing is moved; None: it does."""

    @property
    def freed_bytes(self) -> int | None:
        """By how much the peak falls; None: memory was not asked for."""
        if self.peak_bytes is None or self.peak_without_bytes is None:
            return None
        return self.peak_without_bytes - self.peak_bytes


@dataclass(frozen=True)
class Measured:
    """What a round that went by the plan did, beside what the plan foresaw for a round of its size."""

    saved_bytes: int
    foreseen_saved_bytes: int
    peak_bytes: int
    """Highest device memory at a moment of the round, as in :class:`Planned`."""
    foreseen_peak_bytes: int
    stalled_ms: float
    """Time for which compute, or a read of the device, waited for copies."""
    foreseen_stalled_ms: float
    length_ms: float
    """Of the round, without such waits."""


@dataclass
class ReadDelay:
    """The host reads the device in every round, somewhere; it waits for copies to the host that are queued before."""

    after_unit: str | None
    """The unit that was called, or saved something, last before it; None: there is none."""
    before_unit: str | None
    """The unit that is next; the same as ``after_unit`` if it is read within a call."""
    rounds: int = 0
    """Rounds of which it is clear how long the read waited."""
    waited_ms: float = 0.0
    """Time for which copies kept it waiting, in all of these."""
    last_waited_ms: float = 0.0
    """In the last of these."""


@dataclass
class RoundStats:
    """What the device's times tell of the rounds of an attachment; empty on a device without streams."""

    planned: Planned | None = None
    """None: nothing is planned yet, or the user has set windows."""
    reads: list[ReadDelay] = field(default_factory=list)
    measured: Measured | None = None
    """None: no round has gone by the present plan yet in which memory was looked at."""

    def copy(self) -> RoundStats:
        """A snapshot."""
        return RoundStats(self.planned, [replace(read) for read in self.reads], self.measured)


@dataclass
class OffloadStats:
    """Cumulative counts of one attachment on this rank, as in :class:`UnitStats`: bytes, unless the name says else."""

    saved_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    held_bytes: int = 0
    used_in_place_bytes: int = 0
    late_reloads: int = 0
    copying_out_ms: float = 0.0
    copying_in_ms: float = 0.0
    timed_out_bytes: int = 0
    timed_in_bytes: int = 0
    stalled_ms: float = 0.0
    recomputations: int = 0
    recompute_ms: float = 0.0
    live_host_bytes: int = 0
    """Bytes on lease from the host pool at this moment, for graphs that are still alive."""
    peak_host_bytes: int = 0
    """Most bytes that this attachment had on lease at once."""
    skipped: Counter[str] = field(default_factory=Counter)
    rounds: RoundStats = field(default_factory=RoundStats)
    units: dict[str, UnitStats] = field(default_factory=dict)
    """By the unit's name in ``named_modules()``; a unit that was never called is there with zeros."""


def counted(units: Mapping[str, UnitStats]) -> list[int]:
    """Each unit's whole numbers, which change with all that is counted but times: those are read later."""
    return [
        number
        for unit in units.values()
        for key, number in vars(unit).items()
        if type(number) is int and not key.startswith("timed_")
    ]


def shown(unit: str) -> str:
    """The name to show for a unit; the root of the model has none of its own."""
    return unit or "(whole model)"


def rate_gb_s(size_bytes: float, took_ms: float) -> float | None:
    """GB/s; None if no time was taken."""
    return size_bytes / took_ms / 1e6 if took_ms else None


def total(units: Mapping[str, UnitStats], live_host_bytes: int, rounds: RoundStats | None = None) -> OffloadStats:
    """A snapshot of ``units`` with their sums; later counting does not change it."""
    stats = OffloadStats(live_host_bytes=live_host_bytes)
    if rounds is not None:
        stats.rounds = rounds.copy()
    for name, unit in units.items():
        stats.units[name] = replace(unit, skipped=Counter(unit.skipped))
        stats.skipped.update(unit.skipped)
    add_up(stats, units.values())
    return stats


def add_up(sums: UnitStats | OffloadStats, units: Iterable[UnitStats]) -> None:
    """Adds the counts of ``units`` that can be summed to those of ``sums``."""
    for unit in units:
        for key in SUMMED:
            setattr(sums, key, getattr(sums, key) + getattr(unit, key))
