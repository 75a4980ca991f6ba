"""What users call: attach offloading to an engine or a module, read its counts, take it off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_fgoffload.compat.versions import Pair, installed, too_new, too_old
from ds_fgoffload.config import SECTION, FineGrainedOffloadConfig, find_section, parse_config
from ds_fgoffload.device.streams import accelerator_device, accelerator_is_cpu, product_name, total_device_bytes
from ds_fgoffload.engines.adapter import Adapter, adapt
from ds_fgoffload.engines.checkpoints import UnseenCheckpoints
from ds_fgoffload.engines.fsdp import refuse_sharded
from ds_fgoffload.errors import OffloadConfigError, OffloadStateError
from ds_fgoffload.host_memory.pool import HostPoolSettings, host_pool
from ds_fgoffload.planning.plan_file import Header, MachineOnFile, ModelOnFile, PlanStore, UnitOnFile, of_rank
from ds_fgoffload.planning.planner import PlanGoal
from ds_fgoffload.reporting.report import RankCounts, render
from ds_fgoffload.reporting.step_file import StepFile
from ds_fgoffload.reporting.step_log import StepLog
from ds_fgoffload.reporting.tally import Tally, note_switched_off
from ds_fgoffload.runtime.hooks import ModuleHooks, recomputer_of
from ds_fgoffload.runtime.offloader import Offloader
from ds_fgoffload.saved.eligibility import Eligibility
from ds_fgoffload.saved.transfer import transfer_on
from ds_fgoffload.schedule.plan import Action, Plan
from ds_fgoffload.selection import patterns as selection
from ds_fgoffload.stats import OffloadStats
from ds_fgoffload.text.messages import printable, rank, show, warn, warn_here
from ds_fgoffload.text.sentences import plan_sentence

_ATTRIBUTE = "_ds_fgoffload"


class Attachment:
    """Offloading on one engine or module, from :func:`attach` until :meth:`detach`."""

    def __init__(self, target: nn.Module, adapter: Adapter, config: FineGrainedOffloadConfig) -> None:
        chosen = _select(adapter, config)
        device = accelerator_device()
        pool = host_pool()
        pool.configure(
            HostPoolSettings(**{f.name: getattr(config.host_pool, f.name) for f in fields(HostPoolSettings)})
        )
        pool_user = pool.add_user(type(target).__name__, config.host_pool.quota_bytes)
        transfer = transfer_on(device)
        self._recorder = transfer.recorder
        self._step_files: list[StepFile] = []
        self._device = device
        self._adapter = adapter
        self._target = weakref.ref(target)
        plan = Plan(
            units=dict.fromkeys(chosen.recomputed, Action.RECOMPUTE),
            release_window_bytes=config.release_window_bytes,
            prefetch_window_bytes=config.prefetch_window_bytes,
        )
        self._offloader = Offloader(
            {**chosen.units, **chosen.recomputed},
            chosen.excluded,
            Eligibility(adapter.root, config.min_tensor_bytes, device),
            plan,
            transfer,
            pool_user,
            raise_when_full=config.host_pool.on_full == "error",
            goal=_plan_goal(config),
            plan_store=_plan_store(config, adapter, chosen, device),
        )
        say = warn if adapter.ranks_hold_same_modules else warn_here
        self._recomputer = recomputer_of(
            chosen.recomputed, chosen.units, self._offloader.unit_stats, plan, device, adapter.whole
        )
        hooked = {**chosen.units, **chosen.excluded}
        self._hooks = ModuleHooks(adapter.root, hooked, self._offloader, say, self._recomputer)
        self._unseen_checkpoints = UnseenCheckpoints(adapter.root, self._hooks, self._offloader.unit_stats)
        self._leave_pool = weakref.finalize(self, pool_user.leave)
        if config.enabled and config.release_pipeline_buffers:
            adapter.release_engine_buffers()
        itself = weakref.ref(self)
        adapter.on_destroy(lambda: _call_if_there(itself(), Attachment.detach))
        self._log = StepLog(config.report_after_steps)
        if config.enabled:
            adapter.after_step(lambda: _call_if_there(itself(), Attachment._step_taken))
        self._account = pool_user.account
        self._tally = Tally(self, self._offloader.unit_stats, self._offloader.rounds, self._account)

    def stats(self) -> OffloadStats:
        """Counts of this rank since attaching, also after :meth:`detach`."""
        if self._recomputer is not None:
            self._recomputer.read_cost()
        stats = self._offloader.stats()
        stats.peak_host_bytes = self._account.peak_leased_bytes
        return stats

    def counts(self, rank: int) -> RankCounts:
        """What this rank, which the caller calls ``rank``, has to tell."""
        return RankCounts(rank, self.stats(), host_pool().stats())

    def gathered_counts(self) -> list[dict[str, Any]]:
        """Counts of every rank as plain numbers. Collective: every rank that has the engine must call it."""
        return [counts.as_dict() for counts in self._gather()]

    def report(self, *, expand: bool = False) -> str:
        """The table of all ranks. Collective: every rank that has the engine must call it, and each gets the table.

        Modules that differ by their layer's number are one row; ``expand`` gives each unit of each rank a row. It is
        in ASCII if the encoding of the standard output holds no more.
        """
        return printable(render(self._gather(), expand=expand))

    def print_report(self) -> None:
        """Rank 0 prints :meth:`report`, as far as the standard output can. Collective, too; it never raises for that.

        ``ds_fgoffload.run`` does not print the same table again.
        """
        ranks = self._gather()
        if rank() == 0:
            show(render(ranks))
        if rank() == 0 or len(ranks) > 1:  # else nobody has seen this rank's
            self._tally.mark_reported()

    def record(self, path: str | Path, *, title: str | None = None) -> None:
        """Has the whole of the next step recorded: when each storage was saved, copied, released and used.

        The step is the next round: one micro-batch, or all those of a ``train_batch`` whose forwards run before their
        backwards end. The file is written when the step after it begins, or later if the device is behind; at the
        latest by :meth:`detach`. ``ds-fgoffload draw`` makes a page of it. It concerns this rank alone.

        Args:
            path: of the JSON file to write (``docs/recording.md``); each rank that records needs one of its own.
            title: its headline; default: the class of the model.

        Raises:
            OffloadStateError: nothing is offloaded here, the device has no streams (CPU), or the folder is not there.
        """
        if self._recorder is None:
            raise OffloadStateError(
                f"record: on {self._device} copies are made at once, and there are no times to record: train on an "
                "accelerator"
            )
        if not (self._leave_pool.alive and self._offloader.unit_stats):
            raise OffloadStateError("record: nothing is offloaded here (detached, or not enabled): attach it first")
        facts = {
            "device": str(self._device),
            "rank": str(rank()),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
        }
        planned = self._offloader.rounds.planned
        if planned is not None:
            facts["plan"] = plan_sentence(planned)
        step_file = StepFile(Path(path), title or f"One step of {type(self._adapter.root).__name__}", facts)
        self._step_files.append(step_file)
        self._recorder.show(step_file)

    def detach(self) -> None:
        """Takes every hook off. Graphs that are alive keep working; their host memory goes back as they die."""
        if not self._leave_pool.alive:
            return
        self._hooks.remove()
        self._offloader.end()
        for step_file in self._step_files:
            step_file.warn_if_due()
        self._unseen_checkpoints.remove()
        self._adapter.release()
        self._leave_pool()
        target = self._target()
        if target is not None:
            target.__dict__.pop(_ATTRIBUTE, None)

    def __deepcopy__(self, _memo: dict[int, Any]) -> None:
        # a copy of the module is not attached
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _step_taken(self) -> None:
        self._log.step_taken()
        self._adapter.monitor(lambda: self._log.added(self.counts(0)))
        if self._log.report_is_due:
            self.print_report()

    def _gather(self) -> list[RankCounts]:
        return [replace(counts, rank=number) for number, counts in enumerate(self._adapter.gather(self.counts(0)))]


def attach(
    target: nn.Module, config: Mapping[str, Any] | FineGrainedOffloadConfig | str | Path | None = None
) -> Attachment:
    """Offloads what the selected submodules of ``target`` save for backward.

    Args:
        target: a DeepSpeed engine, after ``deepspeed.initialize``, or any module that is trained without one.
        config: a ``fine_grained_offload`` section, or a whole ds_config with one (dictionary or path). Default: the one
            that the engine was made with.

    Raises:
        OffloadConfigError: there is no section, or it asks for something that cannot be done.
        OffloadStateError: offloading is attached to ``target`` already, or torch or DeepSpeed is too old.
    """
    adapter = adapt(target)
    if get(target) is not None:
        name = type(target).__name__
        msg = f"offloading is attached to this {name} already: call ds_fgoffload.get(model).detach() first"
        raise OffloadStateError(msg)
    _check_versions(installed())
    section = adapter.section() if config is None else _section_of(config)
    if section is None:
        where = "the engine's ds_config" if config is None else "the given config"
        msg = f'{SECTION}: no such section in {where}; give one, such as {{"modules": ["model.layers.*.mlp"]}}'
        raise OffloadConfigError(msg)
    parsed = parse_config(section)
    attachment = Attachment(target, adapter, parsed)
    target.__dict__[_ATTRIBUTE] = attachment
    return attachment


def get(target: nn.Module) -> Attachment | None:
    """The attachment of ``target``, or None."""
    return target.__dict__.get(_ATTRIBUTE)


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, then :func:`attach` if the ds_config has an enabled ``fine_grained_offload`` section.

    Takes and returns what ``deepspeed.initialize`` does. The section is checked before the engine is built.
    """
    return initialize_with(deepspeed.initialize, *args, **kwargs)


def initialize_with(deepspeed_initialize: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """:func:`initialize` on top of the given function, for those who put it in place of ``deepspeed.initialize``."""
    parse_config(find_section(_ds_config_of(args, kwargs)))
    made: tuple[Any, Any, Any, Any] = deepspeed_initialize(*args, **kwargs)
    engine = made[0]
    section = find_section(engine.config)
    attached_below = get(engine) is not None  # by an initialize that ds_fgoffload.run has put in place
    if section is not None and not attached_below:
        if parse_config(section).enabled:
            attach(engine, section)
        else:
            note_switched_off()
    return made


@cache
def _check_versions(pair: Pair) -> None:
    """Once in a process: nobody has tested what is newer than what is supported, and what is older is known to fail."""
    refused = too_old(pair)
    if refused is not None:
        raise OffloadStateError(refused)
    untested = too_new(pair)
    if untested is not None:
        warn(f"{untested}, or compare losses with and without offloading before you rely on them")


def _ds_config_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What ``deepspeed.initialize`` will take its config from; None if that cannot be told from its arguments."""
    given = kwargs.get("config") or kwargs.get("config_params")
    if given is None:
        arguments = kwargs.get("args", args[0] if args else None)
        given = getattr(arguments, "deepspeed_config", None)
    return given


def _section_of(config: Mapping[str, Any] | FineGrainedOffloadConfig | str | Path) -> Any:
    if isinstance(config, FineGrainedOffloadConfig):
        return config
    if isinstance(config, Mapping) and SECTION not in config and not _is_whole_ds_config(config):
        return config
    return find_section(config)


def _is_whole_ds_config(config: Mapping[str, Any]) -> bool:
    return any(key in config for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"))


def _select(adapter: Adapter, config: FineGrainedOffloadConfig) -> selection.Selection:
    if not config.enabled:
        warn(f"{SECTION}.enabled is false: attached, but nothing will be offloaded")
        return selection.Selection({}, {}, {})
    chosen, findings = selection.match(adapter.root, config.modules, config.exclude, config.recompute)
    selection.check([findings] if adapter.ranks_hold_same_modules else adapter.gather(findings))
    refuse_sharded(chosen.recomputed)
    for note in chosen.notes:
        warn(f"{SECTION}: {note}")
    return chosen


def _plan_goal(config: FineGrainedOffloadConfig) -> PlanGoal | None:
    if config.release_window_bytes is not None or config.prefetch_window_bytes is not None:
        return None
    return PlanGoal(
        everything=config.policy == "all",
        max_overhead=config.max_overhead,
        target_saved_bytes=config.target_saved_bytes,
    )


def _plan_store(
    config: FineGrainedOffloadConfig, adapter: Adapter, chosen: selection.Selection, device: torch.device
) -> PlanStore | None:
    if config.plan_file is None or not config.enabled or accelerator_is_cpu():
        return None
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    units = {
        name: UnitOnFile(
            module_class=type(module).__name__,
            parameter_elements=sum(getattr(one, "ds_numel", one.numel()) for one in module.parameters()),
            recompute=name in chosen.recomputed,
        )
        for name, module in {**chosen.units, **chosen.recomputed}.items()
    }
    header = Header(
        versions=installed()._asdict(),
        rank=rank(),
        model=ModelOnFile(
            model_class=type(adapter.root).__name__,
            engine=adapter.kind,
            ranks=ranks,
            min_tensor_bytes=config.min_tensor_bytes,
            excluded=sorted(chosen.excluded),
            units=units,
        ),
        machine=MachineOnFile(device=product_name(device), memory_bytes=total_device_bytes()),
        max_overhead=config.max_overhead,
        target_saved_bytes=config.target_saved_bytes,
    )
    return PlanStore(of_rank(config.plan_file, rank(), ranks), header)


def _call_if_there(attachment: Attachment | None, call: Callable[[Attachment], None]) -> None:
    if attachment is not None:
        call(attachment)
