"""How long a read of the device by the host was kept waiting by copies, told from the times around it.

A blocking read (``.item()``, ``bincount``) returns when all copies to the host that were queued before it are over, on
any stream. Its end is seen in the rounds in which reads are watched, its begin never. It has waited for a copy that
ended just before it; how long, the time since the moment before says, compared with a round without such a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_fgoffload.schedule.plan import Moment
from ds_fgoffload.stats import ReadDelay

SPREAD = 0.05
SPREAD_MS = 0.2
"""The time between two moments differs by so much from round to round for other reasons."""
CLOSE_MS = 0.5
"""A read that waited for a copy was over no later after it."""


class BlockingRead(NamedTuple):
    """What is known of a read in one round."""

    waited_ms: float
    """For copies."""
    after_ms: float
    """From its end to the moment after it."""
    guessed: bool
    """Whether nothing is known for certain yet."""


class BlockingReads:
    """Learns from round to round; a read is named by the moment after it.

    Args:
        delays: gets a :class:`ReadDelay` for each read, which goes on counting.
    """

    def __init__(self, delays: list[ReadDelay]) -> None:
        self._delays = delays
        self._delay_of: dict[Moment, ReadDelay] = {}
        self._unclear: dict[Moment, tuple[int, float]] = {}  # rounds, and the times that they took
        self._undelayed_ms: dict[Moment, float] = {}  # from the moment before to that after, if no copy delays the read
        self._after_ms: dict[Moment, float] = {}  # from the end of the last read to the moment after it

    def count(
        self, moment: Moment, read: BlockingRead, took_ms: float, after_unit: str | None, before_unit: str | None
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

    def seen(
        self,
        moment: Moment,
        begin_ms: float,
        end_ms: float,
        copy_ends_ms: Sequence[float],
        read_ends_ms: Sequence[float] = (),
    ) -> BlockingRead:
        """Between the moments at ``begin_ms`` and ``end_ms`` the device was read.

        Args:
            moment: that at ``end_ms``.
            begin_ms: when compute went on after the moment before.
            end_ms: when it came to the moment.
            copy_ends_ms: when copies to the host ended, all of the round.
            read_ends_ms: when the reads were over; empty: it was not looked out for in this round.
        """
        took_ms = end_ms - begin_ms
        if read_ends_ms:
            after_ms = end_ms - read_ends_ms[-1]
            self._after_ms[moment] = min(after_ms, self._after_ms.get(moment, after_ms))
        after_ms = self._after_ms.get(moment, 0.0)
        if not read_ends_ms:
            read_ends_ms = (end_ms - after_ms,)
        waited_for_ms = [
            copy_ms
            for copy_ms in copy_ends_ms
            if begin_ms < copy_ms <= end_ms and any(abs(read_ms - copy_ms) <= CLOSE_MS for read_ms in read_ends_ms)
        ]
        undelayed_ms = self._undelayed_ms.get(moment, took_ms)
        spread_ms = max(SPREAD_MS, SPREAD * undelayed_ms)
        if not waited_for_ms:
            self._undelayed_ms[moment] = min(took_ms, undelayed_ms)
            return BlockingRead(0.0, after_ms, guessed=False)
        if took_ms < undelayed_ms - spread_ms:  # that was a round in which something else took long
            del self._undelayed_ms[moment]
        if moment not in self._undelayed_ms:
            # all of the time: so that little is copied until it is seen
            return BlockingRead(max(waited_for_ms) - begin_ms, after_ms, guessed=True)
        waited_ms = took_ms - undelayed_ms
        return BlockingRead(waited_ms if waited_ms > spread_ms else 0.0, after_ms, guessed=False)
