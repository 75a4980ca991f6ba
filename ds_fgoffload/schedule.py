"""When storages leave the device and come back: events of the step in, acts for the transfer out.

Pure Python, no tensors, no clock: the runtime drives it with what happens, a planner with what it thinks will happen.

Forward: every save that the plan offloads is copied at once (``OFFLOAD``). Its device memory is given back
(``RELEASE``) only when ``release_window`` newer bytes have been copied behind it: the link works in order, so by then
the copy has long begun, and the compute stream's wait for it is short or over. What is still inside the window when
backward begins is what backward needs first, and is used where it is.

Backward: each need lets storages of the same micro-batch come back (``RELOAD``), last saved first, as long as what is on
the device stays within ``prefetch_window``. A storage needed before its turn is reloaded at once, whatever the windows
say: late, never wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from ds_fgoffload.plan import Action, Plan, Site


class Verb(Enum):
    OFFLOAD = "offload"
    RELEASE = "release"
    RELOAD = "reload"


class Act(NamedTuple):
    verb: Verb
    key: int


class _Place(Enum):
    KEPT = 0  # on the device until it dies; in no window
    LEAVING = 1  # copied to the host, device memory not yet given back
    IN_PLACE = 2  # needed while leaving: stays on the device until it dies
    HOST = 3
    RETURNED = 4  # reload begun


class _Entry:
    __slots__ = ("micro_batch", "place", "site", "size_bytes")

    def __init__(self, site: Site, size_bytes: int, micro_batch: int) -> None:
        self.site = site
        self.size_bytes = size_bytes
        self.micro_batch = micro_batch
        self.place = _Place.KEPT


class Schedule:
    """One per attachment. ``synchronous``: copies are over when they return, so nothing is gained by releasing late."""

    def __init__(self, plan: Plan, *, synchronous: bool) -> None:
        self.plan = plan
        self._synchronous = synchronous
        self._entries: dict[int, _Entry] = {}
        self._leaving: OrderedDict[int, int] = OrderedDict()  # key -> bytes, oldest first
        self._leaving_bytes = 0
        self._backward_bytes = 0  # in place, or returned
        self._on_host: dict[int, list[int]] = {}  # micro-batch -> keys, last saved last; stale keys are passed over
        self._live: dict[int, int] = {}  # micro-batch -> entries alive
        self._largest_storage_bytes = 0
        self._largest_scope_bytes = 0
        self._micro_batch_bytes = 0
        self._largest_micro_batch_bytes = 0
        self._window_bytes = 0

    def micro_batch_began(self) -> None:
        self._micro_batch_bytes = 0

    def scope_closed(self, saved_bytes: int) -> None:
        """A call of a unit has ended that saved ``saved_bytes`` bytes of storages nobody had saved before."""
        if saved_bytes > self._largest_scope_bytes:
            self._largest_scope_bytes = saved_bytes
            self._update_window()

    def saved(self, key: int, site: Site, size_bytes: int, micro_batch: int) -> list[Act]:
        """A storage was saved that is not saved already; ``key`` names it until it dies."""
        entry = self._entries[key] = _Entry(site, size_bytes, micro_batch)
        self._live[micro_batch] = self._live.get(micro_batch, 0) + 1
        self._count(size_bytes)
        if self.plan.action(site) is Action.KEEP:
            return []
        entry.place = _Place.LEAVING
        self._leaving[key] = size_bytes
        self._leaving_bytes += size_bytes
        return [Act(Verb.OFFLOAD, key), *self._releases()]

    def saved_again(self, key: int) -> None:
        """Another op saved a storage that is saved already: backward will need it that much earlier."""
        entry = self._entries[key]
        if entry.place is _Place.LEAVING:
            self._leaving.move_to_end(key)
        elif entry.place is _Place.HOST:
            self._on_host[entry.micro_batch].append(key)

    def stays(self, key: int) -> None:
        """The storage is on the device whatever was decided: no room on the host, or something else holds it."""
        entry = self._entries[key]
        self._forget_place(key, entry)
        entry.place = _Place.KEPT

    def backward_began(self, micro_batch: int) -> list[Act]:
        """Backward of the micro-batch begins. What it needs first comes back now, unless that never left the device."""
        if any(self._entries[key].micro_batch == micro_batch for key in reversed(self._leaving)):
            return []
        return self._prefetch(micro_batch)

    def needed(self, key: int) -> list[Act]:
        """Backward is about to use the storage. If the first act reloads ``key`` itself, that reload is late."""
        entry = self._entries[key]
        acts: list[Act] = []
        if entry.place is _Place.LEAVING:
            self._forget_place(key, entry)
            entry.place = _Place.IN_PLACE
            self._backward_bytes += entry.size_bytes
        elif entry.place is _Place.HOST:
            acts.append(self._reload(key, entry))
        return acts + self._prefetch(entry.micro_batch)

    def died(self, key: int) -> None:
        """The last view of the storage is gone."""
        entry = self._entries.pop(key)
        self._forget_place(key, entry)
        micro_batch = entry.micro_batch
        self._live[micro_batch] -= 1
        if not self._live[micro_batch]:
            del self._live[micro_batch]
            self._on_host.pop(micro_batch, None)

    @property
    def release_window_bytes(self) -> int:
        """Automatic: the largest call's bytes, at most a sixth of a micro-batch's, at least two of the largest storage.

        One call's bytes, because a window smaller than a unit's burst stalls compute at once; a sixth, because what is
        inside the window frees nothing; two storages, so that one is copied while the next is made.
        """
        if self.plan.release_window_bytes is not None:
            return self.plan.release_window_bytes
        return 0 if self._synchronous else self._window_bytes

    @property
    def prefetch_window_bytes(self) -> int:
        """Automatic: twice the window above where a sixth of the micro-batch allows: one in use, one coming back."""
        if self.plan.prefetch_window_bytes is not None:
            return self.plan.prefetch_window_bytes
        return max(self._window_bytes, min(2 * self._window_bytes, self._largest_micro_batch_bytes // 6))

    def _count(self, size_bytes: int) -> None:
        self._micro_batch_bytes += size_bytes
        if size_bytes > self._largest_storage_bytes:
            self._largest_storage_bytes = size_bytes
            self._update_window()
        if self._micro_batch_bytes > self._largest_micro_batch_bytes:
            self._largest_micro_batch_bytes = self._micro_batch_bytes
            self._update_window()

    def _update_window(self) -> None:
        burst = min(self._largest_scope_bytes, self._largest_micro_batch_bytes // 6)
        self._window_bytes = max(2 * self._largest_storage_bytes, burst)

    def _releases(self) -> list[Act]:
        acts = []
        window_bytes = self.release_window_bytes
        while self._leaving_bytes > window_bytes:
            key, size_bytes = self._leaving.popitem(last=False)
            self._leaving_bytes -= size_bytes
            entry = self._entries[key]
            entry.place = _Place.HOST
            self._on_host.setdefault(entry.micro_batch, []).append(key)
            acts.append(Act(Verb.RELEASE, key))
        return acts

    def _prefetch(self, micro_batch: int) -> list[Act]:
        stack = self._on_host.get(micro_batch)
        if not stack:
            return []
        acts = []
        room_bytes = self.prefetch_window_bytes - self._leaving_bytes - self._backward_bytes
        while stack:
            key = stack[-1]
            entry = self._entries.get(key)
            if entry is not None and entry.place is _Place.HOST:
                if entry.size_bytes > room_bytes:
                    break
                room_bytes -= entry.size_bytes
                acts.append(self._reload(key, entry))
            stack.pop()
        return acts

    def _reload(self, key: int, entry: _Entry) -> Act:
        entry.place = _Place.RETURNED
        self._backward_bytes += entry.size_bytes
        return Act(Verb.RELOAD, key)

    def _forget_place(self, key: int, entry: _Entry) -> None:
        if entry.place is _Place.LEAVING:
            del self._leaving[key]
            self._leaving_bytes -= entry.size_bytes
        elif entry.place in (_Place.IN_PLACE, _Place.RETURNED):
            self._backward_bytes -= entry.size_bytes
