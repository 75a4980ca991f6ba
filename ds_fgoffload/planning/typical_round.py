"""One round made of several that went alike: the shortest that is to be expected, or a usual one.

Rounds differ by some per cent, each in other stretches: the host is late here, a neighbour there. What is in time if
every stretch is at its shortest is in time in each of them, but there is no such round: the whole is lengthened towards
the shortest that was seen. How long compute will wait, where it may, shows in stretches of middling length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ds_fgoffload.profiling.profile import ProfiledMoment, RoundProfile

MOST_LENGTHENED = 1.05
"""By so much at most; rounds that differ by more have stretches that are long now and then, and short in between."""


def combine_rounds(
    base: RoundProfile, stretches_of: Sequence[RoundProfile], rates_of: Sequence[RoundProfile], *, usual: bool
) -> RoundProfile:
    """``base`` with the stretches and the lowest rates of the others, which passed the same moments.

    Args:
        base: memory and reads are as they were in it.
        stretches_of: the rounds from which each stretch gets its length.
        rates_of: the rounds of which the lowest rates are taken.
        usual: a usual round, instead of the shortest that is to be expected.
    """
    length = median if usual else min
    stretches_ms = [
        length([_stretch_ms(profile, position) for profile in stretches_of]) for position in range(1, len(base.passed))
    ]
    shortest_ms = min(profile.length_ms for profile in stretches_of)
    longer = 1.0 if usual else min(MOST_LENGTHENED, shortest_ms / max(sum(stretches_ms), 1e-3))
    passed: list[ProfiledMoment] = []
    now_ms = 0.0
    for position, there in enumerate(base.passed):
        if position:
            now_ms += longer * stretches_ms[position - 1]
        read_at_ms = None
        if there.read_at_ms is not None:
            before_ms = passed[-1].at_ms if passed else now_ms
            read_at_ms = max(before_ms, now_ms - (there.at_ms - there.read_at_ms))
        passed.append(there._replace(at_ms=now_ms, read_at_ms=read_at_ms))
    return replace(
        base,
        passed=passed,
        d2h_bytes_per_ms=min(profile.d2h_bytes_per_ms for profile in rates_of),
        h2d_bytes_per_ms=min(profile.h2d_bytes_per_ms for profile in rates_of),
    )


def _stretch_ms(profile: RoundProfile, position: int) -> float:
    """From the moment before to this one."""
    return profile.passed[position].at_ms - profile.passed[position - 1].at_ms
