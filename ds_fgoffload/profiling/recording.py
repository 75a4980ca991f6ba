"""One step as it went on the device: when each storage was saved, copied, released and used. JSON in and out.

Times are milliseconds of the device's clock since the step began. The page and the trace
(:mod:`ds_fgoffload.reporting.page`, :mod:`ds_fgoffload.reporting.chrome_trace`) are drawn from nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Span = tuple[float, float]
"""Begin and end."""


class RecordingError(ValueError):
    """A file is not a recording of a step."""


@dataclass(frozen=True)
class StorageTimes:
    """What became of one saved storage."""

    unit: str
    bytes: int
    saved_ms: float
    freed_ms: float
    """When its last view was dropped: without offloading its memory would have been taken until then."""
    d2h: Span | None = None
    released_ms: float | None = None
    """When its device memory was given back; None if it never was."""
    h2d: Span | None = None
    """The copy back; its device memory is taken from the beginning of it."""
    late: bool = False
    """The copy back began only when backward already needed it."""


@dataclass(frozen=True)
class Call:
    """A unit's forward or backward on the compute stream."""

    unit: str
    start_ms: float
    end_ms: float
    backward: bool = False


@dataclass(frozen=True)
class Stall:
    """Time in which compute waited for a copy."""

    unit: str
    start_ms: float
    end_ms: float
    cause: str
    """``release``: for a copy out that had to end before its memory was given back; ``reload``: for a copy back."""


@dataclass(frozen=True)
class StepRecording:
    """All of it. ``memory`` is what the allocator said, (ms, bytes), if it was asked."""

    title: str
    step_ms: float
    storages: tuple[StorageTimes, ...]
    calls: tuple[Call, ...] = ()
    stalls: tuple[Stall, ...] = ()
    memory: tuple[Span, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Lines for the head of the page: device, versions, configuration."""

    @classmethod
    def from_json(cls, text: str) -> StepRecording:
        """Raises :class:`RecordingError` saying what is wrong."""
        try:
            data = json.loads(text)
            return cls(
                title=str(data["title"]),
                step_ms=float(data["step_ms"]),
                storages=tuple(
                    StorageTimes(**{**entry, "d2h": _span(entry.get("d2h")), "h2d": _span(entry.get("h2d"))})
                    for entry in data["storages"]
                ),
                calls=tuple(Call(**entry) for entry in data.get("calls", ())),
                stalls=tuple(Stall(**entry) for entry in data.get("stalls", ())),
                memory=tuple((float(ms), float(size)) for ms, size in data.get("memory", ())),
                facts=dict(data.get("facts", {})),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordingError(
                f"not a recording of a step: {type(error).__name__}: {error}; docs/recording.md tells its keys"
            ) from error

    @classmethod
    def read(cls, path: Path) -> StepRecording:
        """Raises :class:`RecordingError` if there is none, or one with times or sizes that are not finite."""
        try:
            step = cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror or error}") from error
        for where, number in _not_finite("", asdict(step)):
            raise RecordingError(
                f"{path}: {where} is {number}, and a number is needed; docs/recording.md tells its keys"
            )
        return step

    def to_json(self) -> str:
        """What :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    def saved_bytes(self, *, offloaded: bool) -> list[Span]:
        """Device bytes of the saved storages over time, as steps (ms, bytes from then on)."""
        changes: list[Span] = []
        for s in self.storages:
            changes += [(s.saved_ms, s.bytes)]
            if offloaded and s.released_ms is not None:
                changes += [(s.released_ms, -s.bytes)]
                if s.h2d is not None:
                    changes += [(s.h2d[0], s.bytes), (s.freed_ms, -s.bytes)]
            else:
                changes += [(s.freed_ms, -s.bytes)]
        return _summed(changes)

    @property
    def stalled_ms(self) -> float:
        """Time in which compute waited."""
        return sum(stall.end_ms - stall.start_ms for stall in self.stalls)

    def rate_gb_s(self, direction: str) -> float:
        """Bytes over the time in which copies ran; ``direction`` is ``d2h`` or ``h2d``. 0 if none did."""
        copies = [(span, s.bytes) for s in self.storages if (span := getattr(s, direction)) is not None]
        seconds = _covered_ms(span for span, _ in copies) / 1e3
        return sum(size for _, size in copies) / seconds / 1e9 if seconds else 0.0


def _summed(changes: Iterable[Span]) -> list[Span]:
    total, points = 0.0, [(0.0, 0.0)]
    for ms, change in sorted(changes):
        total += change
        if points[-1][0] == ms:
            points[-1] = (ms, total)
        else:
            points.append((ms, total))
    return points


def _covered_ms(spans: Iterable[Span]) -> float:
    """Length of what the spans cover together."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def _span(value: Sequence[float] | None) -> Span | None:
    if value is None:
        return None
    start, end = value
    return float(start), float(end)


def as_plain(recording: StepRecording) -> dict[str, Any]:
    """For a page: the recording, and what is computed from it."""
    return {
        **asdict(recording),
        "with": recording.saved_bytes(offloaded=True),
        "without": recording.saved_bytes(offloaded=False),
        "stalled_ms": recording.stalled_ms,
        "d2h_gb_s": recording.rate_gb_s("d2h"),
        "h2d_gb_s": recording.rate_gb_s("h2d"),
    }


def _not_finite(where: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_finite(f"{where}.{key}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _not_finite(f"{where}[{number}]", item)
