"""How long a read of the device by the host was kept waiting by copies, told from the times around it.

A blocking read (``.item()``, ``bincount``) returns when all copies to the host that were queued before it are over, on
any stream. Neither its begin nor its end is seen, only the moments of the round before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_fgoffload.plan import Moment
from ds_fgoffload.stats import ReadDelay

SPREAD = 0.05
SPREAD_MS = 0.2
"""The time between two moments differs by so much from round to round for other reasons."""
AFTER_SPREAD_MS = 0.5
"""And so much the time from a read to the next moment, while copies are under way."""


class Read(NamedTuple):
    """What is known of a read in one round."""

    waited_ms: float
    """For copies."""
    after_ms: float
    """From its end to the moment after it."""
    guessed: bool
    """Whether nothing is known for certain yet."""


class Reads:
    """Learns from round to round; a read is named by the moment after it.

    Args:
        delays: gets a :class:`ReadDelay` for each read, which goes on counting.
    """

    def __init__(self, delays: list[ReadDelay]) -> None:
        self._delays = delays
        self._delay_of: dict[Moment, ReadDelay] = {}
        self._unclear: dict[Moment, tuple[int, float]] = {}  # rounds, and the times that they took
        self._undelayed_ms: dict[Moment, float] = {}  # from the moment before to that after, if no copy delays the read
        self._most_after_ms: dict[Moment, float] = {}  # from the read to the moment after it, at the most
        self._after_ms: dict[Moment, float] = {}  # the same, seen in a round in which the read was delayed

    def count(
        self, moment: Moment, read: Read, took_ms: float, after_unit: str | None, before_unit: str | None
    ) -> None:
        """What :meth:`seen` says of the time before ``moment`` is added up; in what it guesses, once that is clear.

        ``took_ms`` is that time, and the units are those around it.
        """
        delay = self._delay_of.get(moment)
        if delay is None:
            delay = self._delay_of[moment] = ReadDelay(after_unit, before_unit)
            self._delays.append(delay)
        rounds, in_all_ms = self._unclear.pop(moment, (0, 0.0))
        if read.guessed:
            self._unclear[moment] = (rounds + 1, in_all_ms + took_ms)
            return
        delay.rounds += rounds + 1
        delay.waited_ms += max(0.0, in_all_ms - rounds * self._undelayed_ms[moment]) + read.waited_ms
        delay.last_waited_ms = read.waited_ms

    def seen(self, moment: Moment, begin_ms: float, end_ms: float, copy_ends_ms: Sequence[float]) -> Read:
        """Between the moments at ``begin_ms`` and ``end_ms`` the device was read.

        The read was over after every copy that it waited for, and what follows it takes the same time in every round:
        so it was not kept waiting by a copy that ended longer before the next moment than another did before.
        """
        took_ms = end_ms - begin_ms
        copy_end_ms = max((ms for ms in copy_ends_ms if begin_ms < ms <= end_ms), default=None)
        if copy_end_ms is None:
            return self._undelayed(moment, took_ms)
        after_ms = end_ms - copy_end_ms
        most_after_ms = self._most_after_ms[moment] = min(after_ms, self._most_after_ms.get(moment, took_ms))
        if after_ms > most_after_ms + AFTER_SPREAD_MS:
            return self._undelayed(moment, took_ms)
        undelayed_ms = self._undelayed_ms.get(moment)
        if undelayed_ms is None:
            return Read((copy_end_ms - begin_ms) / 2, after_ms, guessed=True)
        if took_ms <= undelayed_ms + max(SPREAD_MS, SPREAD * undelayed_ms):
            return Read(0.0, self._after_ms.get(moment, 0.0), guessed=False)
        after_ms = self._after_ms[moment] = min(after_ms, self._after_ms.get(moment, took_ms))
        return Read(took_ms - undelayed_ms, after_ms, guessed=False)

    def _undelayed(self, moment: Moment, took_ms: float) -> Read:
        self._undelayed_ms[moment] = min(took_ms, self._undelayed_ms.get(moment, took_ms))
        return Read(0.0, self._after_ms.get(moment, 0.0), guessed=False)
