"""The runtime of one attachment: what the hooks see becomes events for the schedule, and its acts are carried out here.

A :class:`Scope` is one call of a unit in one micro-batch; it gives each saved tensor its site. Autograd calls in from
the forward thread and from its own backward threads; one lock serialises them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial

import torch
from deepspeed.utils import logger
from torch import nn

from ds_fgoffload.compat.private import tree_leaves
from ds_fgoffload.errors import HostPoolError
from ds_fgoffload.host_memory.pool import HostPool, PoolUser
from ds_fgoffload.planning.plan_file import PlanStore
from ds_fgoffload.planning.planner import PlanGoal
from ds_fgoffload.planning.tuner import Tuner
from ds_fgoffload.saved.eligibility import DEVICE_FULL, EXCLUDED, HOST_FULL, PARAMETER, Eligibility
from ds_fgoffload.saved.saved_tensors import KeptTensor, SavedStorage, SavedView
from ds_fgoffload.saved.tensors import Layout, checksum, storage_bytes, storage_identity
from ds_fgoffload.saved.transfer import Death, Parcel, ParcelState, Transfer
from ds_fgoffload.schedule.plan import Act, Action, Plan, Site, Verb
from ds_fgoffload.schedule.schedule import Schedule
from ds_fgoffload.stats import OffloadStats, RoundStats, UnitStats, shown, total
from ds_fgoffload.text.messages import warn

ALONE_BYTES = 1 << 20
"""A storage of this size or more travels alone: copies of 1 MiB already run at nine tenths of the link's rate."""
CHECKED_MICRO_BATCHES = 1
"""Number of first micro-batches in which the bytes of a storage that is saved again are compared: the host waits."""
PARCEL_BYTES = 16 << 20
"""A parcel of smaller ones is sent off at the latest when it has this size."""


class Scope:
    """Open from the unit's call until it returns or raises.

    Args:
        unit: the unit's name.
        module: the unit.
        stats: the unit's counts.
        micro_batch: number of the micro-batch on this attachment.
        call: how many times the unit had been called in this micro-batch before.
        excluded: the tensors saved here stay on the device.
    """

    __slots__ = ("call", "excluded", "micro_batch", "module", "saved_bytes", "saves", "stats", "unit", "waiting",
                 "waiting_bytes", "waiting_site")  # fmt: skip

    def __init__(
        self, unit: str, module: nn.Module, stats: UnitStats, micro_batch: int, call: int, *, excluded: bool
    ) -> None:
        self.unit = unit
        self.module = module
        self.stats = stats
        self.micro_batch = micro_batch
        self.call = call
        self.excluded = excluded
        self.saved_bytes = 0
        self.waiting: list[SavedStorage] = []
        """Small storages that will be packed into the next parcel."""
        self.waiting_bytes = 0
        self.waiting_site: Site | None = None
        """The site of the first that waits; it stands for the parcel."""
        self.saves = 0
        """Eligible saves so far, whether their storages were new or shared."""

    def site(self) -> Site:
        """The site of the latest eligible save."""
        return Site(self.unit, self.call, self.saves - 1)


class Offloader:
    """Moves what the units save.

    Args:
        units: the units' modules by name.
        excluded: modules inside units whose tensors stay on the device, by name.
        eligibility, plan: decide per tensor, and per site.
        goal: what plans made from recorded rounds are to reach; None: none is made, the windows hold.
        transfer, pool: where the bytes go.
        plan_store: where what plans are made from is kept for later runs.
        raise_when_full: raise when the host pool is full, instead of keeping the tensor on the device.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        excluded: Mapping[str, nn.Module],
        eligibility: Eligibility,
        plan: Plan,
        transfer: Transfer,
        pool: HostPool | PoolUser,
        *,
        raise_when_full: bool,
        goal: PlanGoal | None = None,
        plan_store: PlanStore | None = None,
    ) -> None:
        self._eligibility = eligibility
        self._plan = plan
        self._transfer = transfer
        self._pool = pool
        self._raise_when_full = raise_when_full
        recorder = transfer.recorder
        self._schedule = Schedule(plan, synchronous=transfer.synchronous, observer=recorder)
        self._tuner = None if recorder is None else Tuner(goal, recorder, plan_store)
        self.rounds = RoundStats() if recorder is None else recorder.rounds
        self.plans = goal is not None and recorder is not None
        self._lock = threading.RLock()
        self._unit_stats = {name: UnitStats() for name in units}
        self._excluded_stats = {name: UnitStats() for name in excluded}
        self._deaths: deque[Death] = deque()
        self._parcels: dict[int, weakref.ref[Parcel]] = {}
        self._by_identity: dict[int, weakref.ref[SavedStorage]] = {}
        self._overwrite: set[str] = set()
        """Units that save what was saved before and overwritten since: each of their saves is copied separately."""
        self._live_host_bytes = 0
        self._last_key = 0
        self._micro_batch = 0
        self._calls: dict[str, int] = {}
        self._scope_bytes: dict[str, int] = {}  # what each unit's last call saved
        self._told_full = False

    def begin_micro_batch(self, size: int = 0) -> bool:
        """A forward begins: calls are counted anew, and parameters may have moved. True: a new round does, too.

        ``size``: of what the root is called with, in tokens or elements.
        """
        with self._lock:
            self._process_deaths()
            self._by_identity = {key: ref for key, ref in self._by_identity.items() if ref() is not None}
            self._micro_batch += 1
            self._calls.clear()
            self._eligibility.refresh()
            self._transfer.compute()
            if self._tuner is not None and self._schedule.begins_round(self._micro_batch):
                self._schedule.follow(self._tuner.points(size))
            return self._schedule.micro_batch_began(self._micro_batch, size)

    def watch_backward(self, output: object) -> None:
        """The forward of a micro-batch has returned ``output``: its backward begins at one of the tensors in it."""
        began = partial(self._backward_began, self._micro_batch)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(began)

    def open_scope(self, unit: str, module: nn.Module) -> Scope:
        """A unit, or an excluded module in one, is called with gradients enabled."""
        with self._lock:
            excluded = unit in self._excluded_stats
            stats = (self._excluded_stats if excluded else self._unit_stats)[unit]
            stats.calls += 1
            call = self._calls.get(unit, 0)
            self._calls[unit] = call + 1
            self._process_deaths()
            expected_bytes = self._scope_bytes.get(unit, 0)
            self._carry_out(self._schedule.scope_opened(self._micro_batch, unit, call, expected_bytes))
            return Scope(unit, module, stats, self._micro_batch, call, excluded=excluded)

    def pass_by(self, landmark: int) -> None:
        """A module outside all units is called in forward: a moment like others, at which memory may leave."""
        with self._lock:
            self._process_deaths()
            self._carry_out(self._schedule.passed_by(self._micro_batch, landmark))

    def close_scope(self, scope: Scope) -> None:
        """The call has returned or raised: what still waits to be packed is sent off."""
        with self._lock:
            self._send_waiting(scope)
            self._scope_bytes[scope.unit] = scope.saved_bytes
            self._carry_out(self._schedule.scope_closed(scope.micro_batch, scope.unit, scope.call, scope.saved_bytes))

    def pack(self, scope: Scope, tensor: torch.Tensor) -> SavedView | KeptTensor:
        """Autograd saves ``tensor`` in ``scope``; what is returned is what autograd holds."""
        if type(tensor) is nn.Parameter:  # about half of all saved tensors are parameters
            scope.stats.skipped[PARAMETER] += 1
            return KeptTensor(tensor)
        with self._lock:
            reason = EXCLUDED if scope.excluded else self._eligibility.skip_reason(tensor, scope.module)
            if reason is not None:
                scope.stats.skipped[reason] += 1
                return KeptTensor(tensor)
            scope.saves += 1
            storage = self._saved_before(scope, tensor)
            if storage is None:
                storage = SavedStorage(tensor, self._transfer.compute())
                if self._micro_batch <= CHECKED_MICRO_BATCHES:
                    storage.checksum = checksum(storage_bytes(tensor))
                self._by_identity[storage.original.identity] = weakref.ref(storage)
                self._send(scope, storage)
            else:
                self._transfer.compute()  # this stream will read it, too
                if storage.parcel is not None:
                    self._schedule.saved_again(storage.parcel.key)
            return SavedView(storage, Layout.of(tensor))

    def unpack(self, packed: SavedView | KeptTensor) -> torch.Tensor:
        """Autograd needs a tensor back. Raises ``RuntimeError`` if it was changed in place since it was saved."""
        if type(packed) is KeptTensor:
            return packed.tensor()
        assert type(packed) is SavedView
        with self._lock:
            storage = packed.storage
            parcel = storage.parcel
            # After its first use the schedule need not be asked, unless other parcels have died since.
            if parcel is not None and (self._deaths or not parcel.needed or parcel.state is ParcelState.ON_HOST):
                self._need(parcel)
            return storage.view(packed.layout)

    @property
    def unit_stats(self) -> Mapping[str, UnitStats]:
        """The counts of the units, which go on changing; they refer to nothing else."""
        return self._unit_stats

    def end(self) -> None:
        """No more micro-batches will come; graphs that are alive keep working."""
        if self._tuner is not None:
            self._tuner.end()

    def stats(self) -> OffloadStats:
        """A snapshot of the counts."""
        with self._lock:
            self._process_deaths()
            if self._tuner is not None:
                self._tuner.look()
            return total(self._unit_stats, self._live_host_bytes, self.rounds)

    def _backward_began(self, micro_batch: int, _gradients: tuple[torch.Tensor, ...]) -> None:
        with self._lock:
            self._process_deaths()
            self._carry_out(self._schedule.backward_began(micro_batch))
            if self._tuner is not None:
                self._tuner.look()

    def _saved_before(self, scope: Scope, tensor: torch.Tensor) -> SavedStorage | None:
        found = self._by_identity.get(storage_identity(tensor))
        storage = None if found is None else found()
        if storage is None or scope.unit in self._overwrite or not storage.covers(tensor):
            return None
        # A collective, or a kernel that writes over its input, does not increase the version counter.
        if storage.checksum is None or torch.equal(storage.checksum, checksum(storage_bytes(tensor))):
            return storage
        self._overwrite.add(scope.unit)
        warn(
            f"fine_grained_offload: {shown(scope.unit)} saves a storage that was saved before and overwritten since by "
            "something that does not increase the version counter (a collective in place, a kernel that writes over "
            "its input, .data); so each tensor that it saves is copied by itself"
        )
        return None

    def _send(self, scope: Scope, storage: SavedStorage) -> None:
        """A storage that nobody had saved: off to the host, alone or packed with others, unless the plan keeps it."""
        size_bytes = storage.size_bytes
        scope.stats.saved_bytes += size_bytes
        scope.saved_bytes += size_bytes
        if self._plan.sites and self._plan.action(scope.site()) is not Action.OFFLOAD:
            scope.stats.kept_bytes += size_bytes
        elif size_bytes >= ALONE_BYTES:
            self._send_parcel(scope, [storage], scope.site())
        else:
            if scope.waiting and scope.waiting[0].compute != storage.compute:
                self._send_waiting(scope)
            if not scope.waiting:
                scope.waiting_site = scope.site()
            scope.waiting.append(storage)
            scope.waiting_bytes += size_bytes
            if scope.waiting_bytes >= PARCEL_BYTES:
                self._send_waiting(scope)

    def _send_waiting(self, scope: Scope) -> None:
        if scope.waiting:
            assert scope.waiting_site is not None
            storages, scope.waiting, scope.waiting_bytes = scope.waiting, [], 0
            self._send_parcel(scope, storages, scope.waiting_site)

    def _send_parcel(self, scope: Scope, storages: list[SavedStorage], site: Site) -> None:
        self._process_deaths()
        self._last_key += 1
        first = storages[0]
        aliases = [storage.alias for storage in storages]
        parcel = Parcel(
            self._last_key, aliases, scope.stats, self._transfer, first.compute, self._deaths, first.original
        )
        self._parcels[parcel.key] = weakref.ref(parcel)
        if self._tuner is not None and self._tuner.lacks_memory():
            self._schedule.follow_windows()
        self._carry_out(self._schedule.saved(parcel.key, site, parcel.size_bytes, scope.micro_batch))
        if parcel.state is ParcelState.RESIDENT:  # not worth it, or no room on the host
            scope.stats.kept_bytes += parcel.saved_bytes
            if len(storages) > 1:
                return
        else:
            scope.stats.offloaded_bytes += parcel.saved_bytes
        for storage, offset in zip(storages, parcel.offsets, strict=True):
            storage.send_with(parcel, offset)

    def _need(self, parcel: Parcel) -> None:
        self._process_deaths()
        parcel.needed = True
        if parcel.state is ParcelState.COPYING_OUT and not parcel.accounted:
            parcel.accounted = True
            parcel.stats.used_in_place_bytes += parcel.saved_bytes
        acts = self._schedule.needed(parcel.key)
        # What is needed now is copied before what is needed later.
        if parcel.state is ParcelState.ON_HOST and self._reload(parcel):
            parcel.stats.late_reloads += 1
        self._carry_out([act for act in acts if act.key != parcel.key])

    def _carry_out(self, acts: list[Act]) -> None:
        for verb, key in acts:
            parcel = self._parcels[key]()
            if parcel is None:  # died since; its death waits to be buried
                continue
            if verb is Verb.OFFLOAD:
                self._offload(parcel)
            elif verb is Verb.RELEASE:
                parcel.release()
            else:
                # A reload ahead of need must not end a step that has no memory for it: it will come when needed.
                with contextlib.suppress(torch.OutOfMemoryError):
                    self._reload(parcel)

    def _reload(self, parcel: Parcel) -> bool:
        moved = parcel.reload()
        if moved:
            parcel.stats.reloaded_bytes += parcel.saved_bytes
        elif not parcel.accounted:
            parcel.stats.held_bytes += parcel.saved_bytes
            self._schedule.stays(parcel.key, held=True)
        parcel.accounted = True
        return moved

    def _offload(self, parcel: Parcel) -> None:
        lease = self._pool.lease(parcel.size_bytes)
        if lease is not None:
            self._live_host_bytes += parcel.size_bytes  # before anything can fail: its death takes them off
            try:
                parcel.offload(lease)
            except torch.OutOfMemoryError:  # there is none left to pack in
                self._schedule.stays(parcel.key)
                parcel.stats.skipped[DEVICE_FULL] += 1
            return
        self._schedule.stays(parcel.key)
        parcel.stats.skipped[HOST_FULL] += 1
        refusal = self._pool.last_refusal
        if self._raise_when_full:
            raise HostPoolError(refusal)
        if not self._told_full:
            self._told_full = True
            logger.warning(f"fine_grained_offload: {refusal}; tensors that find no room stay on the device")

    def _process_deaths(self) -> None:
        """Forgets the parcels that died since the last event, wherever and whenever that was."""
        while self._deaths:
            death = self._deaths.popleft()
            self._live_host_bytes -= death.leased_bytes
            del self._parcels[death.key]
            self._carry_out(self._schedule.died(death.key, death.when))
