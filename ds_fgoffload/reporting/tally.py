"""What each attachment of this process has counted: it stays when the attachment is gone, for the report at the end."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from ds_fgoffload.host_memory.lease import Account
from ds_fgoffload.host_memory.pool import host_pool
from ds_fgoffload.reporting.report import RankCounts
from ds_fgoffload.stats import RoundStats, UnitStats, counted, total

_tallies: list[Tally] = []
_switched_off = False


class _Attachment(Protocol):
    def counts(self, rank: int) -> RankCounts: ...


class Tally:
    """Keeps neither the attachment nor its engine alive."""

    def __init__(
        self, attachment: _Attachment, units: Mapping[str, UnitStats], rounds: RoundStats, account: Account
    ) -> None:
        self._attachment = weakref.ref(attachment)
        self._units = units
        self._rounds = rounds
        self._account = account
        self._reported: list[int] | None = None
        _tallies.append(self)

    def counts(self, rank: int) -> RankCounts:
        """The counts of now, or of the attachment's end."""
        attachment = self._attachment()
        if attachment is not None:
            return attachment.counts(rank)
        stats = total(self._units, 0, self._rounds)
        stats.peak_host_bytes = self._account.peak_leased_bytes
        return RankCounts(rank, stats, host_pool().stats())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted at all."""
        return not any(counted(self._units))

    @property
    def has_news(self) -> bool:
        """Whether anything was counted since :meth:`mark_reported`, or there was no report yet."""
        return counted(self._units) != self._reported

    def mark_reported(self) -> None:
        """A report with the counts of now was printed."""
        self._reported = counted(self._units)


def tallies() -> Sequence[Tally]:
    """One for each attachment that this process has made, in that order."""
    return _tallies


def note_switched_off() -> None:
    """An engine was made with a section that says ``"enabled": false``."""
    global _switched_off  # noqa: PLW0603
    _switched_off = True


def is_switched_off() -> bool:
    """Whether nothing was attached to because the user does not want it."""
    return _switched_off and not _tallies
