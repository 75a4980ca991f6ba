"""The runtime of one attachment: what the hooks see becomes events for the schedule, and its acts are carried out here.

Autograd calls in from the forward thread and from its own backward threads; one lock serialises them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Mapping

import torch
from deepspeed.utils import logger
from torch import nn

from ds_fgoffload.eligibility import Eligibility
from ds_fgoffload.errors import HostPoolError
from ds_fgoffload.layout import Layout
from ds_fgoffload.plan import Plan
from ds_fgoffload.pool import HostPool
from ds_fgoffload.saved import Death, KeptTensor, SavedStorage, SavedView, State
from ds_fgoffload.schedule import Act, Schedule, Verb
from ds_fgoffload.scope import Scope
from ds_fgoffload.stats import OffloadStats, UnitStats, total
from ds_fgoffload.transfer import Transfer

EXCLUDED = "excluded"
HOST_FULL = "host_full"


class Offloader:
    """Moves what the units save.

    Args:
        units: the units' modules by name.
        excluded: modules inside units whose tensors stay on the device, by name.
        eligibility: decides per tensor.
        plan: decides per site.
        transfer, pool: where the bytes go.
        raise_when_full: raise when the host pool is full, instead of keeping the tensor on the device.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        excluded: Mapping[str, nn.Module],
        eligibility: Eligibility,
        plan: Plan,
        transfer: Transfer,
        pool: HostPool,
        *,
        raise_when_full: bool,
    ) -> None:
        self._eligibility = eligibility
        self._transfer = transfer
        self._pool = pool
        self._raise_when_full = raise_when_full
        self._schedule = Schedule(plan, synchronous=transfer.synchronous)
        self._lock = threading.RLock()
        self._unit_stats = {name: UnitStats() for name in units}
        self._excluded_stats = {name: UnitStats() for name in excluded}
        self._deaths: deque[Death] = deque()
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}
        self._by_identity: dict[int, weakref.ref[SavedStorage]] = {}
        self._live_host_bytes = 0
        self._last_key = 0
        self._micro_batch = 0
        self._calls: dict[str, int] = {}
        self._told_full = False

    def begin_micro_batch(self) -> None:
        """The forward of a micro-batch begins: calls are counted anew, and parameters may have moved."""
        with self._lock:
            self._bury()
            self._micro_batch += 1
            self._calls.clear()
            self._eligibility.refresh()
            self._schedule.micro_batch_began()

    def open_scope(self, unit: str, module: nn.Module) -> Scope:
        """A unit, or an excluded module inside one, is called with gradients enabled."""
        with self._lock:
            excluded = unit in self._excluded_stats
            stats = (self._excluded_stats if excluded else self._unit_stats)[unit]
            stats.calls += 1
            call = self._calls.get(unit, 0)
            self._calls[unit] = call + 1
            return Scope(unit, module, stats, self._micro_batch, call, excluded=excluded)

    def close_scope(self, scope: Scope) -> None:
        with self._lock:
            self._schedule.scope_closed(scope.saved_bytes)

    def pack(self, scope: Scope, tensor: torch.Tensor) -> SavedView | KeptTensor:
        """Autograd saves ``tensor`` in ``scope``; what is returned is what autograd holds."""
        with self._lock:
            reason = EXCLUDED if scope.excluded else self._eligibility.skip_reason(tensor, scope.module)
            if reason is not None:
                scope.stats.skipped[reason] += 1
                return KeptTensor(tensor)
            self._bury()
            site = scope.next_site()
            storage = self._saved_before(tensor)
            if storage is not None:
                self._schedule.saved_again(storage.key)
                return SavedView(storage, Layout.of(tensor))
            self._last_key += 1
            storage = SavedStorage(self._last_key, tensor, scope.stats, self._transfer, self._deaths)
            self._storages[storage.key] = self._by_identity[storage.identity] = weakref.ref(storage)
            scope.stats.saved_bytes += storage.size_bytes
            scope.saved_bytes += storage.size_bytes
            self._carry_out(self._schedule.saved(storage.key, site, storage.size_bytes, scope.micro_batch))
            if storage.state is State.RESIDENT:
                scope.stats.kept_bytes += storage.size_bytes
            return SavedView(storage, Layout.of(tensor))

    def unpack(self, packed: SavedView | KeptTensor) -> torch.Tensor:
        """Autograd needs a tensor back.

        Raises:
            RuntimeError: it was changed in place since it was saved.
        """
        if isinstance(packed, KeptTensor):
            return packed.tensor()
        with self._lock:
            self._bury()
            storage = packed.storage
            self._carry_out(self._schedule.needed(storage.key), needed=storage)
            return storage.view(packed.layout)

    def stats(self) -> OffloadStats:
        """A snapshot of the counts."""
        with self._lock:
            self._bury()
            return total(self._unit_stats, self._live_host_bytes)

    def _saved_before(self, tensor: torch.Tensor) -> SavedStorage | None:
        found = self._by_identity.get(tensor.untyped_storage()._cdata)
        storage = None if found is None else found()
        return storage if storage is not None and storage.covers(tensor) else None

    def _carry_out(self, acts: list[Act], *, needed: SavedStorage | None = None) -> None:
        for verb, key in acts:
            storage = self._storages[key]()
            if storage is None:  # died since; its death waits to be buried
                continue
            if verb is Verb.OFFLOAD:
                self._offload(storage)
            elif verb is Verb.RELEASE:
                storage.release()
            elif storage is not needed:
                # A reload ahead of need must not end the step that has no memory for it: it will come when needed.
                with contextlib.suppress(torch.OutOfMemoryError):
                    self._reload(storage)
        if needed is not None and needed.state is State.ON_HOST and self._reload(needed):
            needed.stats.late_reloads += 1

    def _reload(self, storage: SavedStorage) -> bool:
        moved = storage.reload()
        if moved:
            storage.stats.reloaded_bytes += storage.size_bytes
        else:
            storage.stats.held_bytes += storage.size_bytes
            self._schedule.stays(storage.key)
        return moved

    def _offload(self, storage: SavedStorage) -> None:
        lease = self._pool.lease(storage.size_bytes)
        if lease is not None:
            storage.offload(lease)
            storage.stats.offloaded_bytes += storage.size_bytes
            self._live_host_bytes += storage.size_bytes
            return
        self._schedule.stays(storage.key)
        storage.stats.skipped[HOST_FULL] += 1
        refusal = self._pool.last_refusal
        if self._raise_when_full:
            raise HostPoolError(refusal)
        if not self._told_full:
            self._told_full = True
            logger.warning(f"fine_grained_offload: {refusal}; tensors that find no room stay on the device")

    def _bury(self) -> None:
        """Forgets the storages that died since the last event, wherever and whenever that was."""
        while self._deaths:
            death = self._deaths.popleft()
            self._live_host_bytes -= death.leased_bytes
            self._schedule.died(death.key)
            del self._storages[death.key]
            known = self._by_identity.get(death.identity)
            if known is not None and known() is None:
                del self._by_identity[death.identity]
