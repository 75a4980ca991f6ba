"""Where compute and the link are expected to be in a round that may differ from any other, from what has come.

No clock is read: the device is behind the host, and what counts is when it will have done what is queued.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_fgoffload.schedule.plan import Kind, Moment, Place, Timetable


class Clock:
    """Of one round."""

    __slots__ = ("_d2h_end_ms", "_now_ms", "_part_of_need", "_waited_ms")

    def __init__(self) -> None:
        self._now_ms = 0.0
        self._waited_ms = 0.0
        self._d2h_end_ms = 0.0
        self._part_of_need = 1.0
        """What is at work in backward saved this part of what was foreseen."""

    def passed(self, times: Timetable, position: int, moment: Moment, size_bytes: int) -> None:
        """The moment at ``position`` is there; ``size_bytes``: what is, or was, saved at its place."""
        part = 1.0
        if moment.kind is Kind.SAVED:
            part = _part(times, moment.place, size_bytes)
        elif moment.kind is Kind.NEEDED:
            part, self._part_of_need = self._part_of_need, _part(times, moment.place, size_bytes)
        self._now_ms += part * times.stretches_ms[position]

    def copied(self, times: Timetable, size_bytes: int) -> float:
        """A copy to the host begins now, or when those before it are over. When it is."""
        self._d2h_end_ms = max(self._d2h_end_ms, self._now_ms) + size_bytes / times.d2h_bytes_per_ms
        return self._d2h_end_ms

    def is_over(self, times: Timetable, end_ms: float) -> bool:
        """Whether a copy that ends then is over now."""
        return end_ms + times.spare_ms <= self._now_ms

    def may_wait_until(self, times: Timetable, then_ms: float) -> bool:
        """Whether compute may wait until then, and the spare time beyond. If so, it does."""
        wait_ms = max(0.0, then_ms - self._now_ms)
        if self._waited_ms + wait_ms + times.spare_ms > times.allowed_ms:
            return False
        self._waited_ms += wait_ms
        self._now_ms += wait_ms
        return True

    def needs_ms(self, times: Timetable, needs: Sequence[tuple[int, Place, int]]) -> list[float]:
        """When each will be needed, if nothing else comes. ``needs``: position, place and bytes, in order."""
        at_ms, part = self._now_ms, 1.0
        found = []
        for position, place, size_bytes in needs:
            at_ms += part * times.stretches_ms[position]
            found.append(at_ms)
            part = _part(times, place, size_bytes)
        return found


def _part(times: Timetable, place: Place, size_bytes: int) -> float:
    """How long compute takes that saves ``size_bytes`` there, as a part of what was foreseen."""
    foreseen_bytes = times.saved_bytes.get(place, 0)
    return 1 + times.with_bytes * (size_bytes / foreseen_bytes - 1) if foreseen_bytes else 1.0
