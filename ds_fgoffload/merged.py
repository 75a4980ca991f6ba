"""One round made of several that went alike, every stretch as short as it was in any of them, or as it usually is.

Rounds differ by some per cent, each in other stretches: the host is late here, a neighbour there. What is in time if
every stretch is at its shortest is in time in each of them. How long compute will wait, where it may, is told by those
of middling length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ds_fgoffload.simulation import Passed, Recording


def merged(
    base: Recording,
    stretches_of: Sequence[Recording],
    rates_of: Sequence[Recording],
    length: Callable[[Iterable[float]], float],
) -> Recording:
    """``base`` with the stretches and the lowest rates of the others, which passed the same moments.

    Args:
        base: memory and reads are as they were in it.
        stretches_of: the rounds from which each stretch gets its length.
        rates_of: the rounds of which the lowest rates are taken.
        length: of a stretch, from its lengths in ms in those rounds, such as ``min``.
    """
    passed: list[Passed] = []
    now_ms = 0.0
    for position, there in enumerate(base.passed):
        if position:
            now_ms += length([_stretch_ms(recording, position) for recording in stretches_of])
        read_at_ms = None
        if there.read_at_ms is not None:
            before_ms = passed[-1].at_ms if passed else now_ms
            read_at_ms = max(before_ms, now_ms - (there.at_ms - there.read_at_ms))
        passed.append(there._replace(at_ms=now_ms, read_at_ms=read_at_ms))
    return replace(
        base,
        passed=passed,
        d2h_bytes_per_ms=min(recording.d2h_bytes_per_ms for recording in rates_of),
        h2d_bytes_per_ms=min(recording.h2d_bytes_per_ms for recording in rates_of),
    )


def _stretch_ms(recording: Recording, position: int) -> float:
    """From the moment before to this one."""
    return recording.passed[position].at_ms - recording.passed[position - 1].at_ms
