"""When parcels leave the device and come back: events of the step in, acts for the transfer out.

Pure Python, no tensors, no clock: the runtime drives it with what happens, a planner with what it thinks will happen.

Forward: every save that the plan offloads is copied at once (``OFFLOAD``). Its device memory is given back
(``RELEASE``) only when ``release_window_bytes`` newer bytes have been copied behind it: the link works in order, so by
then the copy has long begun, and the compute stream's wait for it is short or over. What is still inside the window
when backward begins is what backward needs first, and is used where it is.

Backward: what will be needed next (:mod:`~ds_fgoffload.order`) comes back (``RELOAD``) as long as what is on the device
stays within ``prefetch_window_bytes``. What is needed before its turn is reloaded at once, whatever the windows say:
late, never wrong. If it was late for want of room, the window is made that much larger.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from ds_fgoffload.order import NeedOrder, Place
from ds_fgoffload.plan import Plan, Site


class Verb(Enum):
    OFFLOAD = "offload"
    RELEASE = "release"
    RELOAD = "reload"


class Act(NamedTuple):
    verb: Verb
    key: int


class _Where(Enum):
    KEPT = 0  # on the device until it dies; in no window
    LEAVING = 1  # copied to the host, device memory not yet given back
    IN_PLACE = 2  # needed while leaving: stays on the device until it dies
    HOST = 3
    RETURNED = 4  # reload begun


class _Entry:
    __slots__ = ("micro_batch", "needed", "place", "size_bytes", "where")

    def __init__(self, place: Place, size_bytes: int, micro_batch: int) -> None:
        self.place = place
        self.size_bytes = size_bytes
        self.micro_batch = micro_batch
        self.where = _Where.LEAVING
        self.needed = False


class Schedule:
    """One per attachment. ``synchronous``: copies are over when they return, so nothing is gained by releasing late."""

    def __init__(self, plan: Plan, *, synchronous: bool) -> None:
        self._plan = plan
        self._synchronous = synchronous
        self._order = NeedOrder()
        self._entries: dict[int, _Entry] = {}
        self._leaving: OrderedDict[int, int] = OrderedDict()  # key -> bytes, oldest first
        self._leaving_bytes = 0
        self._backward_bytes = 0  # in place, or returned
        self._alive_bytes = 0
        self._most_alive_bytes = 0
        self._largest_parcel_bytes = 0
        self._largest_scope_bytes = 0
        self._window_bytes = 0
        self._room_wanted_bytes = 0
        self._device_bytes_before = 0  # on the device after the last event of backward

    def micro_batch_began(self, micro_batch: int) -> None:
        """The forward of a micro-batch begins."""
        self._order.micro_batch_began(micro_batch)

    def scope_opened(self, expected_bytes: int) -> list[Act]:
        """A unit is called that saved ``expected_bytes`` the last time.

        The window is kept for them from now on, not only as they are saved: so what the unit allocates takes the place
        of what earlier calls have left, before allocations of other sizes split it up.
        """
        acts = []
        while self._leaving and self._leaving_bytes + expected_bytes > self.release_window_bytes:
            acts.append(self._release(next(iter(self._leaving))))
        return acts

    def scope_closed(self, saved_bytes: int) -> None:
        """A call of a unit has ended that saved ``saved_bytes`` bytes of storages nobody had saved before."""
        if saved_bytes > self._largest_scope_bytes:
            self._largest_scope_bytes = saved_bytes
            self._update_window()

    def saved(self, key: int, site: Site, size_bytes: int, micro_batch: int) -> list[Act]:
        """A parcel is to go to the host; ``key`` names it until it dies, ``site`` is that of its first storage."""
        self._entries[key] = _Entry(self._order.saved(micro_batch, site), size_bytes, micro_batch)
        self._leaving[key] = size_bytes
        self._leaving_bytes += size_bytes
        self._alive_bytes += size_bytes
        if size_bytes > self._largest_parcel_bytes or self._alive_bytes > self._most_alive_bytes:
            self._largest_parcel_bytes = max(self._largest_parcel_bytes, size_bytes)
            self._most_alive_bytes = max(self._most_alive_bytes, self._alive_bytes)
            self._update_window()
        acts = [Act(Verb.OFFLOAD, key)]
        while self._leaving_bytes > self.release_window_bytes:
            acts.append(self._release(next(iter(self._leaving))))
        return acts

    def saved_again(self, key: int) -> None:
        """Another op saved a storage of the parcel: backward will need it that much earlier."""
        entry = self._entries[key]
        if entry.where is _Where.LEAVING:
            self._leaving.move_to_end(key)
        elif entry.where is _Where.HOST:
            self._order.left(key, entry.micro_batch, entry.place)

    def stays(self, key: int) -> None:
        """The parcel is on the device whatever was decided: no room on the host, or something else holds it."""
        entry = self._entries[key]
        self._forget(key, entry)
        entry.where = _Where.KEPT

    def backward_began(self, micro_batch: int) -> list[Act]:
        """Backward of the micro-batch begins. What it needs first comes back now, unless that never left the device."""
        self._order.backward_began(micro_batch)
        some_never_left = any(self._entries[key].micro_batch == micro_batch for key in reversed(self._leaving))
        if some_never_left and not self._order.next_is_on_host():
            return []
        return self._prefetch(micro_batch)

    def needed(self, key: int) -> list[Act]:
        """Backward is about to use the parcel. If the first act reloads ``key`` itself, that reload is late."""
        entry = self._entries[key]
        acts: list[Act] = []
        late = entry.where is _Where.HOST
        if late:
            # What is foreseen and yet on the host, this or another parcel, found no room.
            if self._order.next_key(entry.micro_batch) is not None:
                wanted_bytes = self._device_bytes_before + entry.size_bytes
                self._room_wanted_bytes = max(self._room_wanted_bytes, wanted_bytes)
            acts.append(self._reload(key, entry))
        elif entry.where is _Where.LEAVING:
            self._forget(key, entry)
            entry.where = _Where.IN_PLACE
            self._backward_bytes += entry.size_bytes
        if not entry.needed:
            entry.needed = True
            self._order.needed(entry.micro_batch, entry.place, late=late)
            acts += self._release_others(entry)
        return acts + self._prefetch(entry.micro_batch)

    def died(self, key: int) -> list[Act]:
        """The last view of what is in the parcel is gone."""
        entry = self._entries.pop(key)
        self._forget(key, entry)
        self._alive_bytes -= entry.size_bytes
        self._order.died(key, entry.micro_batch, entry.place)
        return self._prefetch(entry.micro_batch) if entry.needed else []

    @property
    def release_window_bytes(self) -> int:
        """Automatic: the largest call's bytes, at most an eighth of all that is alive, at least two largest parcels.

        One call's bytes, because a window smaller than a unit's burst stalls compute at once; an eighth, because what
        is inside the window frees nothing; two parcels, so that one is copied while the next is made.
        """
        if self._plan.release_window_bytes is not None:
            return self._plan.release_window_bytes
        return 0 if self._synchronous else self._window_bytes

    @property
    def prefetch_window_bytes(self) -> int:
        """Automatic: twice the window above: one in use, one coming back.

        More if reloads were late for want of room.
        """
        if self._plan.prefetch_window_bytes is not None:
            return self._plan.prefetch_window_bytes
        return max(2 * self._window_bytes, self._room_wanted_bytes)

    def _update_window(self) -> None:
        burst = min(self._largest_scope_bytes, self._most_alive_bytes // 8)
        self._window_bytes = max(2 * self._largest_parcel_bytes, burst)

    def _release(self, key: int) -> Act:
        entry = self._entries[key]
        self._forget(key, entry)
        entry.where = _Where.HOST
        self._order.left(key, entry.micro_batch, entry.place)
        return Act(Verb.RELEASE, key)

    def _release_others(self, needed: _Entry) -> list[Act]:
        """What other micro-batches saved last is not needed soon: as much of it goes as this one brings in."""
        acts: list[Act] = []
        room_bytes = needed.size_bytes
        while self._leaving:
            key, size_bytes = next(iter(self._leaving.items()))
            room_bytes -= size_bytes
            if self._entries[key].micro_batch == needed.micro_batch or room_bytes < 0:
                break
            acts.append(self._release(key))
        return acts

    def _prefetch(self, micro_batch: int) -> list[Act]:
        acts = []
        window_bytes = self.prefetch_window_bytes
        while (key := self._order.next_key(micro_batch)) is not None:
            entry = self._entries[key]
            if self._leaving_bytes + self._backward_bytes + entry.size_bytes > window_bytes:
                break
            acts.append(self._reload(key, entry))
        self._device_bytes_before = self._leaving_bytes + self._backward_bytes
        return acts

    def _reload(self, key: int, entry: _Entry) -> Act:
        self._forget(key, entry)
        entry.where = _Where.RETURNED
        self._backward_bytes += entry.size_bytes
        return Act(Verb.RELOAD, key)

    def _forget(self, key: int, entry: _Entry) -> None:
        """Takes the parcel out of the account of where it is."""
        if entry.where is _Where.LEAVING:
            del self._leaving[key]
            self._leaving_bytes -= entry.size_bytes
        elif entry.where is _Where.HOST:
            self._order.came_back(key, entry.place)
        elif entry.where in (_Where.IN_PLACE, _Where.RETURNED):
            self._backward_bytes -= entry.size_bytes
