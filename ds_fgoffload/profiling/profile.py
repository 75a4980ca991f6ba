"""What was measured of one round: its moments with their times, bytes and memory, and the rates of the link."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from ds_fgoffload.schedule.plan import Moment, Place


class ProfiledMoment(NamedTuple):
    """A moment of a recorded round."""

    moment: Moment
    at_ms: float
    size_bytes: int
    """Of what is saved at this moment; 0 at others."""
    memory_bytes: int
    """Device memory allocated at this moment, and all that was on the host alone."""
    read_at_ms: float | None = None
    """When the host, waiting for the device since the moment before, went on; None: it did not wait."""


@dataclass(frozen=True)
class RoundProfile:
    """A round, in the order of the compute stream."""

    passed: Sequence[ProfiledMoment]
    d2h_bytes_per_ms: float
    h2d_bytes_per_ms: float
    held: AbstractSet[Place] = frozenset()
    """Places whose memory something else kept until backward."""
    stalled_ms: float = 0.0
    """Time for which compute waited for copies; not in the times above."""
    guessed: bool = False
    """Whether it is not certain how long reads of the device were kept waiting by copies."""
    sizes: tuple[int, ...] = ()
    """Of what the root was called with, in tokens or elements, by micro-batch of the round."""

    @property
    def length_ms(self) -> float:
        return self.passed[-1].at_ms - self.passed[0].at_ms if self.passed else 0.0

    def is_like(self, other: RoundProfile) -> bool:
        """Whether the same things happened in the same order."""
        return [passed.moment for passed in self.passed] == [passed.moment for passed in other.passed]

    @property
    def peak_bytes(self) -> int:
        return max((passed.memory_bytes for passed in self.passed), default=0)
