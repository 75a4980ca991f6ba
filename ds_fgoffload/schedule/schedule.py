"""When parcels leave the device and come back: events of the step in, acts for the transfer out.

Pure Python, no tensors, no time of day: the runtime drives it with what happens. It reports each event to an
*observer*, which may record when the device passes it.

Forward: every save that the plan offloads is copied at once (``OFFLOAD``). Its device memory is given back
(``RELEASE``) at the moment from which the copy is known to be over, if a round has been recorded
(:class:`~ds_fgoffload.schedule.plan.Points`). Before that, when ``release_window_bytes`` newer bytes have been copied
behind it: the link works in order, so by then the copy has long begun, and the compute stream's wait for it is short or
over. What has not been released when backward begins is what backward needs first, and is used where it is.

Backward: what will be needed next (:mod:`~ds_fgoffload.schedule.order`) comes back (``RELOAD``) at the last moment that
is early enough; without a recording, as long as what is on the device stays within ``prefetch_window_bytes``. What is
needed before its turn is reloaded at once: late, never wrong. If it was late for want of room, the window is made that
much larger.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import Enum
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any

from ds_fgoffload.schedule.clock import Clock
from ds_fgoffload.schedule.order import NeedOrder
from ds_fgoffload.schedule.plan import Act, Kind, Moment, Observer, Place, Plan, Points, Site, Timetable, Verb


class _Where(Enum):
    KEPT = 0  # on the device until it dies; in no window
    LEAVING = 1  # copied to the host, device memory not yet given back
    IN_PLACE = 2  # needed next, or used, while leaving: stays on the device until it dies
    HOST = 3
    RETURNED = 4  # reload begun


class _Entry:
    __slots__ = ("copied_at_ms", "micro_batch", "needed", "place", "reload_at", "size_bytes", "where")

    def __init__(self, place: Place, size_bytes: int, micro_batch: int) -> None:
        self.place = place
        self.size_bytes = size_bytes
        self.micro_batch = micro_batch
        self.where = _Where.KEPT
        self.needed = False
        self.copied_at_ms: float | None = None
        """When its copy to the host is expected to be over; None: the plan says from which position on it is."""
        self.reload_at: int | None = None
        """Position at which it comes back; None: it does so at once where it is late."""


class Schedule:
    """One per attachment. ``synchronous``: copies are over when they return, so nothing is gained by releasing late."""

    def __init__(self, plan: Plan, *, synchronous: bool, observer: Observer | None = None) -> None:
        self._plan = plan
        self._synchronous = synchronous
        self._observer = observer
        self._order = NeedOrder()
        self._entries: dict[int, _Entry] = {}
        self._leaving: OrderedDict[int, int] = OrderedDict()  # key -> bytes, oldest first
        self._leaving_bytes = 0
        self._backward_bytes = 0  # in place, or returned
        self._host_bytes = 0
        self._alive_bytes = 0
        self._most_alive_bytes = 0
        self._largest_parcel_bytes = 0
        self._largest_scope_bytes = 0
        self._window_bytes = 0
        self._room_wanted_bytes = 0
        self._device_bytes_before = 0  # on the device after the last event of backward
        self._points: Points | None = None
        self._round_points: Points | None = None
        self._timed_bytes = 0  # copied in this round to learn the link's rate
        self._to_reload: list[tuple[int, int, int]] = []  # heap: planned position, position of its need, key
        self._landmarks: dict[int, int] = {}  # calls of modules that are no units, in this micro-batch
        self._position = -1  # of the latest moment that is also in the planned round
        self._clock = Clock()

    def follow(self, points: Points | None) -> None:
        """Follow these points from the next round on; None: the windows."""
        self._round_points = points

    def follow_windows(self) -> None:
        """For the rest of this round: memory is short, and nothing is known that would spare it without waits."""
        self._points = None

    def begins_round(self, micro_batch: int) -> bool:
        """Whether ``micro_batch``, whose forward is about to begin, begins a new round."""
        return self._order.begins_round(micro_batch)

    def micro_batch_began(self, micro_batch: int, size: int = 0) -> bool:
        """The forward of a micro-batch of ``size`` elements begins. True if a new round does."""
        new_round = self._order.micro_batch_began(micro_batch)
        if new_round:
            if self._observer is not None:
                self._observer.round_began(self._round_points)
            self._points = self._round_points
            self._position = -1
            self._clock = Clock()
            self._timed_bytes = 0
            self._to_reload.clear()
        if self._observer is not None:
            self._observer.micro_batch_began(size)
        self._landmarks.clear()
        return new_round

    def passed_by(self, micro_batch: int, landmark: int) -> list[Act]:
        """A module that is no unit is called; ``landmark`` tells it from others."""
        call = self._landmarks[landmark] = self._landmarks.get(landmark, 0) + 1
        return self._pass(Kind.LANDMARK, micro_batch, Site("", call, landmark))

    def scope_opened(self, micro_batch: int, unit: str, call: int, expected_bytes: int) -> list[Act]:
        """A unit is called that saved ``expected_bytes`` the last time.

        The window is kept for them from now on, not only as they are saved: so what the unit allocates takes the place
        of what earlier calls have left, before allocations of other sizes split it up.
        """
        acts = self._pass(Kind.OPENED, micro_batch, Site(unit, call, -1))
        return acts + self._keep_window(expected_bytes)

    def scope_closed(self, micro_batch: int, unit: str, call: int, saved_bytes: int) -> list[Act]:
        """A call of a unit has ended that saved ``saved_bytes`` bytes of storages nobody had saved before."""
        if saved_bytes > self._largest_scope_bytes:
            self._largest_scope_bytes = saved_bytes
            self._update_window()
        return self._pass(Kind.CLOSED, micro_batch, Site(unit, call, -1))

    def saved(self, key: int, site: Site, size_bytes: int, micro_batch: int) -> list[Act]:
        """A parcel may go to the host; ``key`` names it until it dies, ``site`` is that of its first storage.

        If ``OFFLOAD`` is not among the acts, it is kept.
        """
        place = self._order.saved(micro_batch, site)
        entry = self._entries[key] = _Entry(place, size_bytes, micro_batch)
        acts = self._pass(Kind.SAVED, micro_batch, site, size_bytes)
        if self._points is not None:
            entry.reload_at = self._points.reload.get(place)
        self._alive_bytes += size_bytes
        if size_bytes > self._largest_parcel_bytes or self._alive_bytes > self._most_alive_bytes:
            self._largest_parcel_bytes = max(self._largest_parcel_bytes, size_bytes)
            self._most_alive_bytes = max(self._most_alive_bytes, self._alive_bytes)
            self._update_window()
        if self._points is not None and not self._moves(self._points, place, size_bytes):
            return acts
        entry.where = _Where.LEAVING
        self._leaving[key] = size_bytes
        self._leaving_bytes += size_bytes
        if self._points is not None and self._points.times is not None and place in self._points.release:
            entry.copied_at_ms = self._clock.copied(self._points.times, size_bytes)
        return [*acts, Act(Verb.OFFLOAD, key), *self._keep_window(0)]

    def saved_again(self, key: int) -> None:
        """Another op saved a storage of the parcel: backward will need it that much earlier."""
        entry = self._entries[key]
        if entry.where is _Where.LEAVING:
            self._leaving.move_to_end(key)
        elif entry.where is _Where.HOST:
            self._order.left(key, entry.micro_batch, entry.place)

    def stays(self, key: int, *, held: bool = False) -> None:
        """The parcel is on the device whatever was decided: no room on the host, or something else holds it."""
        entry = self._entries[key]
        self._move(key, entry, _Where.KEPT)
        if held and self._observer is not None:
            self._observer.held(entry.place)

    def backward_began(self, micro_batch: int) -> list[Act]:
        """Backward of the micro-batch begins. What it needs first comes back now, unless that never left the device."""
        acts = self._pass(Kind.BACKWARD, micro_batch, _BACKWARD)
        if self._points is not None and self._points.times is not None:
            self._time_reloads(self._points, self._points.times, micro_batch)
            acts += self._release_due(self._points) + self._reload_due()
        self._order.backward_began(micro_batch)
        some_never_left = any(self._entries[key].micro_batch == micro_batch for key in reversed(self._leaving))
        if some_never_left and not self._order.next_is_on_host():
            return acts
        return acts + self._prefetch(micro_batch)

    def needed(self, key: int) -> list[Act]:
        """Backward is about to use the parcel. If an act reloads ``key`` itself, that reload is late."""
        entry = self._entries[key]
        late = entry.where is _Where.HOST
        acts: list[Act] = []
        if late:
            # What is foreseen and yet on the host, this or another parcel, found no room.
            if self._order.next_key(entry.micro_batch) is not None:
                wanted_bytes = self._device_bytes_before + entry.size_bytes
                self._room_wanted_bytes = max(self._room_wanted_bytes, wanted_bytes)
            acts.append(self._reload(key, entry))
        elif entry.where is _Where.LEAVING:
            self._move(key, entry, _Where.IN_PLACE)
        if not entry.needed:
            entry.needed = True
            acts += self._pass(Kind.NEEDED, entry.micro_batch, entry.place.site, needed_bytes=entry.size_bytes)
            self._order.needed(entry.micro_batch, entry.place, late=late)
            if entry.where is not _Where.KEPT:
                acts += self._release_others(entry)
        return acts + self._prefetch(entry.micro_batch)

    def died(self, key: int, when: Any = None) -> list[Act]:
        """The last view of what is in the parcel is gone; ``when`` is for the observer."""
        entry = self._entries.pop(key)
        if self._observer is not None and self._order.ordinal(entry.micro_batch) is not None:
            self._observer.died(entry.place, when)
        self._alive_bytes -= entry.size_bytes
        self._move(key, entry, _Where.KEPT)
        self._order.died(key, entry.micro_batch, entry.place)
        return self._prefetch(entry.micro_batch) if entry.needed else []

    @property
    def release_window_bytes(self) -> int:
        """Automatic: the largest call's bytes, at most an eighth of all that is alive, at least two largest parcels.

        One call's bytes, because if the window is smaller than what one call saves, compute waits at once; an eighth,
        because what is inside the window frees nothing; two parcels, so that one is copied while the next is made.
        """
        if self._plan.release_window_bytes is not None:
            return self._plan.release_window_bytes
        return 0 if self._synchronous else self._window_bytes

    @property
    def prefetch_window_bytes(self) -> int:
        """Automatic: twice the window above, one in use, one coming back; more if reloads lacked room."""
        if self._plan.prefetch_window_bytes is not None:
            return self._plan.prefetch_window_bytes
        return max(2 * self._window_bytes, self._room_wanted_bytes)

    def _pass(
        self, kind: Kind, micro_batch: int, site: Site, size_bytes: int = 0, *, needed_bytes: int = 0
    ) -> list[Act]:
        """The moment is there: what was planned for it, or for a moment before it that did not come."""
        ordinal = self._order.ordinal(micro_batch)
        if ordinal is None or (self._observer is None and self._points is None):
            return []
        moment = Moment(kind, Place(ordinal, site))
        if self._observer is not None:
            self._observer.passed(moment, size_bytes, self._host_bytes)
        if self._points is None:
            return []
        position = self._points.positions.get(moment, -1)
        if position > self._position:
            self._position = position
            if self._points.times is not None:
                self._clock.passed(self._points.times, position, moment, size_bytes or needed_bytes)
        return self._release_due(self._points) + self._reload_due()

    def _moves(self, points: Points, place: Place, size_bytes: int) -> bool:
        if points.moved is None or place in points.moved:
            return True
        if self._timed_bytes >= points.timed_bytes:
            return False
        self._timed_bytes += size_bytes
        return True

    def _release_due(self, points: Points) -> list[Act]:
        acts = []
        for key in tuple(self._leaving):
            entry = self._entries[key]
            if entry.reload_at is not None and entry.reload_at <= self._position:
                self._move(key, entry, _Where.IN_PLACE)  # it would have to come back at once
            elif self._is_to_leave(points, entry):
                acts.append(self._release(key, entry))
        return acts

    def _is_to_leave(self, points: Points, entry: _Entry) -> bool:
        is_due = points.release.get(entry.place, self._position + 1) <= self._position
        if entry.copied_at_ms is None or points.times is None:
            return is_due
        return self._clock.is_over(points.times, entry.copied_at_ms) or (
            is_due and self._clock.may_wait_until(points.times, entry.copied_at_ms)
        )

    def _time_reloads(self, points: Points, times: Timetable, micro_batch: int) -> None:
        """What backward of the micro-batch needs is known now: each comes back in time for when that will be."""
        needs: list[tuple[int, int, _Entry]] = []
        for key, entry in self._entries.items():
            if entry.micro_batch == micro_batch:
                position = points.positions.get(Moment(Kind.NEEDED, entry.place))
                if position is not None and position > self._position:
                    needs.append((position, key, entry))
        needs.sort(key=itemgetter(0))
        comes_ms = self._clock.needs_ms(times, [(at, entry.place, entry.size_bytes) for at, _, entry in needs])
        begin_ms = math.inf
        number = len(needs)
        for (_, key, entry), at_ms in zip(reversed(needs), reversed(comes_ms), strict=True):
            if entry.where not in (_Where.LEAVING, _Where.HOST) or entry.reload_at is None:
                continue
            begin_ms = min(begin_ms, at_ms - times.spare_ms) - entry.size_bytes / times.h2d_bytes_per_ms
            while number and comes_ms[number - 1] > begin_ms:
                number -= 1
            entry.reload_at = needs[number - 1][0] if number else self._position
            if entry.where is _Where.HOST:
                self._will_reload(points, key, entry)

    def _reload_due(self) -> list[Act]:
        acts = []
        while self._to_reload and self._to_reload[0][0] <= self._position:
            position, _, key = heappop(self._to_reload)
            entry = self._entries.get(key)
            if entry is not None and entry.where is _Where.HOST and entry.reload_at == position:
                acts.append(self._reload(key, entry))
        return acts

    def _keep_window(self, expected_bytes: int) -> list[Act]:
        """Releases the oldest until there is room in the window."""
        acts: list[Act] = []
        if self._points is None or self._points.within_window:
            while self._leaving and self._leaving_bytes + expected_bytes > self.release_window_bytes:
                key = next(iter(self._leaving))
                acts.append(self._release(key, self._entries[key]))
        return acts

    def _update_window(self) -> None:
        burst = min(self._largest_scope_bytes, self._most_alive_bytes // 8)
        self._window_bytes = max(2 * self._largest_parcel_bytes, burst)

    def _release_others(self, needed: _Entry) -> list[Act]:
        """What other micro-batches saved last is not needed soon: as much of it goes as this one brings in."""
        acts: list[Act] = []
        room_bytes = needed.size_bytes
        while self._leaving and self._points is None:
            key, size_bytes = next(iter(self._leaving.items()))
            room_bytes -= size_bytes
            if self._entries[key].micro_batch == needed.micro_batch or room_bytes < 0:
                break
            acts.append(self._release(key, self._entries[key]))
        return acts

    def _prefetch(self, micro_batch: int) -> list[Act]:
        """Fills the window with what comes next."""
        acts: list[Act] = []
        window_bytes = self.prefetch_window_bytes
        while self._points is None and (key := self._order.next_key(micro_batch)) is not None:
            entry = self._entries[key]
            if self._leaving_bytes + self._backward_bytes + entry.size_bytes > window_bytes:
                break
            acts.append(self._reload(key, entry))
        self._device_bytes_before = self._leaving_bytes + self._backward_bytes
        return acts

    def _release(self, key: int, entry: _Entry) -> Act:
        self._move(key, entry, _Where.HOST)
        return Act(Verb.RELEASE, key)

    def _reload(self, key: int, entry: _Entry) -> Act:
        self._move(key, entry, _Where.RETURNED)
        return Act(Verb.RELOAD, key)

    def _move(self, key: int, entry: _Entry, to: _Where) -> None:
        """Moves the parcel to another state and updates the byte counts."""
        if entry.where is _Where.LEAVING:
            del self._leaving[key]
            self._leaving_bytes -= entry.size_bytes
        elif entry.where is _Where.HOST:
            self._host_bytes -= entry.size_bytes
            self._order.came_back(key, entry.place)
        elif entry.where in (_Where.IN_PLACE, _Where.RETURNED):
            self._backward_bytes -= entry.size_bytes
        entry.where = to
        if to is _Where.HOST:
            self._host_bytes += entry.size_bytes
            self._order.left(key, entry.micro_batch, entry.place)
            if self._points is not None and entry.reload_at is not None:
                self._will_reload(self._points, key, entry)
        elif to in (_Where.IN_PLACE, _Where.RETURNED):
            self._backward_bytes += entry.size_bytes

    def _will_reload(self, points: Points, key: int, entry: _Entry) -> None:
        assert entry.reload_at is not None
        needed = points.positions.get(Moment(Kind.NEEDED, entry.place), 0)
        heappush(self._to_reload, (entry.reload_at, needed, key))


_BACKWARD = Site("", 0, -1)
