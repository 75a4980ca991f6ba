"""The recording that ``ds-fgoffload draw`` is given: read, and looked through for numbers that cannot be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_fgoffload.recording import RecordingError, StepRecording


def read(file: Path) -> StepRecording:
    """Raises :class:`RecordingError` if it is none, or has times or sizes that are not finite."""
    step = StepRecording.read(file)
    for where, number in _not_finite("", asdict(step)):
        raise RecordingError(f"{file}: {where} is {number}, and a number is needed; docs/recording.md tells its keys")
    return step


def _not_finite(where: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_finite(f"{where}.{key}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _not_finite(f"{where}[{number}]", item)
