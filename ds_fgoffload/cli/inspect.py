"""``ds-fgoffload inspect``: what a model saves for backward, module by module, and what each pattern would move."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ds_fgoffload import api
from ds_fgoffload.cli.random_model import RandomModel
from ds_fgoffload.cli.script_failure import own_traceback, ran_out_of_memory
from ds_fgoffload.config import SECTION, FineGrainedOffloadConfig, find_section
from ds_fgoffload.device.streams import accelerator_device, make_streams
from ds_fgoffload.errors import HostPoolError, OffloadConfigError, OffloadStateError
from ds_fgoffload.inspection.inventory import Inventory
from ds_fgoffload.inspection.watcher import Watcher
from ds_fgoffload.script import UserScript
from ds_fgoffload.text.sizes import parse_size

_LESS = "a shorter sequence, a smaller batch or fewer layers"
_SMALLER_SCRIPT = (
    f"give it {_LESS} for this run (what is saved grows in proportion), or use --transformers config.json "
    "--set num_hidden_layers=2"
)
_SMALLER_MODEL = f"give it {_LESS} (--tokens, --batch, --set num_hidden_layers=2); what is saved grows in proportion"


class LeastBytes(NamedTuple):
    """``min_tensor_bytes``, and where it comes from."""

    size_bytes: int
    source: str


@dataclass(frozen=True)
class Inspection:
    """A model and what one of its micro-batches saved."""

    root: nn.Module
    inventory: Inventory
    what: str
    section: Mapping[str, Any] | None
    """The section of the configuration that the script was run with."""
    incomplete: str | None = None
    """Why more would have been saved."""

    def least(self, asked_bytes: int | None) -> LeastBytes:
        """``asked_bytes`` if the command line has them, else what the script's section says, else the default."""
        if asked_bytes is not None:
            return LeastBytes(asked_bytes, "--min-tensor-bytes")
        default = int(FineGrainedOffloadConfig.model_fields["min_tensor_bytes"].default)
        if self.section is None or "min_tensor_bytes" not in self.section:
            return LeastBytes(default, "the default")
        value = self.section["min_tensor_bytes"]
        try:
            return LeastBytes(parse_size(value), f"the script's {SECTION} section")
        except ValueError:
            return LeastBytes(default, f"the default, since the script's section has {value!r}, which is no size")


@dataclass(frozen=True)
class Progress:
    """Where a person learns how far it is."""

    line: Callable[[str], None] = lambda _text: None
    """Told once, and stays."""
    now: Callable[[str], None] = lambda _text: None
    """Takes the place of what it was told before."""


_SILENT = Progress()


class RunFailedError(OffloadStateError):
    """What was run for its micro-batches has raised.

    Attributes:
        traceback: the script's own lines; empty if there is no script.
        inspection: what is known nevertheless.
        exit_code: what the command ends with.
    """

    def __init__(self, message: str, traceback: str, inspection: Inspection | None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.traceback = traceback
        self.inspection = inspection


class _Enough(BaseException):
    """As many micro-batches as were asked for have run."""


class _NoEngine(BaseException):
    """The script trains, and not with DeepSpeed."""


class _Watch:
    """Puts a recorder on the first engine that the script makes, and ends the script after ``micro_batches``.

    Also ends it where it trains with no engine: it would go on to its end, and there would be nothing to tell.
    """

    def __init__(self, micro_batches: int, progress: Progress) -> None:
        self.engine: Any = None
        self.recorder: Watcher | None = None
        self._micro_batches = micro_batches
        self._begun = 0
        self.has_enough = False
        self._progress = progress
        self.steps_without_engine = 0
        self._most_steps = micro_batches + 2
        self._makes_engine = False

    @contextmanager
    def optimizers_watched(self) -> Iterator[None]:
        """All of PyTorch's."""
        handle = register_optimizer_step_post_hook(self._optimizer_stepped)
        try:
            yield
        finally:
            handle.remove()

    def _optimizer_stepped(self, *_: Any) -> None:
        if self.engine is not None or self._makes_engine:  # DeepSpeed steps to have the optimizer's states made
            return
        self.steps_without_engine += 1
        if self.steps_without_engine >= self._most_steps:
            raise _NoEngine

    def initialize(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._makes_engine = True
        try:
            made = original(*args, **kwargs)
        finally:
            self._makes_engine = False
        if self.engine is None:
            self.engine = made[0]
            self.recorder = Watcher(made[0].module, make_streams(accelerator_device()), self._micro_batch_begins)
        return made

    def inspection(self, what: str) -> Inspection:
        """Of what the engine has done."""
        assert self.recorder is not None
        self.recorder.remove()
        return Inspection(self.engine.module, self.recorder.latest, what, find_section(self.engine.config))

    def _micro_batch_begins(self) -> None:
        if self._begun == self._micro_batches:
            self.has_enough = True
            raise _Enough
        self._begun += 1
        self._progress.now(f"micro-batch {self._begun} of {self._micro_batches}")
        if attachment := api.get(self.engine):  # the innermost hooks alone would see what the units save
            attachment.detach()


def inspect_script(arguments: Sequence[str], micro_batches: int, progress: Progress = _SILENT) -> Inspection:
    """Runs a script until its first engine has done ``micro_batches``; the last of them is told about.

    Raises:
        RunFailedError: it raised, or ended with an exit code other than 0.
        OffloadStateError: there is no such script, it made no engine, or ran too few micro-batches.
    """
    script = UserScript.of(arguments)
    if script is None:
        raise OffloadStateError("no script to run: give a script.py or -m package.module, and its arguments")
    if not script.as_module and Path(script.target).is_dir() and not Path(script.target, "__main__.py").exists():
        raise OffloadStateError(f"{script.target} is a folder without a __main__.py: give the path of a script in it")
    become_single_rank()
    watch = _Watch(micro_batches, progress)
    try:
        with watch.optimizers_watched(), suppress(_Enough):
            script.run(watch.initialize)
    except _NoEngine:
        raise OffloadStateError(
            f"{script.target} has done {watch.steps_without_engine} optimizer steps and made no DeepSpeed engine, and "
            "only a model that an engine was made of is seen; have it train with DeepSpeed (any ZeRO stage, 0 too; "
            "for a Trainer: --deepspeed ds_config.json), or use --transformers. If it makes its engine later, give "
            "--micro-batches a larger number"
        ) from None
    except (OffloadConfigError, OffloadStateError, HostPoolError):
        raise
    except SystemExit as exit_:
        if not watch.has_enough:
            raise _ended(exit_.code, None if watch.recorder is None else watch.inspection(script.target)) from None
    except Exception as error:
        found = None if watch.recorder is None else watch.inspection(script.target)
        raise _failure(error, found, own_traceback(error), "the script", _SMALLER_SCRIPT) from error
    if watch.recorder is None:
        raise OffloadStateError(
            f"{script.target} ended without calling deepspeed.initialize, and only a model that an engine was made of "
            "is seen; for a model without DeepSpeed use --transformers, or start the script as it is started to train"
        )
    if not watch.recorder.inventory.records:
        raise OffloadStateError(
            f"{script.target}: no micro-batch with gradients has ended its forward, so nothing was saved to tell about"
        )
    return watch.inspection(script.target)


def inspect_transformers(random_model: RandomModel, micro_batches: int, progress: Progress = _SILENT) -> Inspection:
    """Builds the model and runs ``micro_batches`` of random tokens; the last is told about.

    Raises:
        RunFailedError: the device's memory ran out, or the model raised.
    """
    progress.now("reading the configuration")

    def tell_size(parameters: int, size_bytes: int) -> None:
        for line in random_model.announced(parameters, size_bytes, micro_batches, accelerator_device()):
            progress.line(line)
        progress.now("building the model")

    model = random_model.build(tell_size)
    recorder = Watcher(model, make_streams(accelerator_device()))
    try:
        took = ""
        for number in range(micro_batches):
            progress.now(f"micro-batch {number + 1} of {micro_batches}{took}")
            began = time.perf_counter()
            random_model.run(model)
            took = f" (the one before took {time.perf_counter() - began:.0f} s)"
    except torch.OutOfMemoryError as error:
        found = Inspection(model, recorder.latest, random_model.source, None)
        raise _failure(error, found, "", f"--transformers {random_model.source}", _SMALLER_MODEL) from error
    except Exception as error:
        raise RunFailedError(random_model.why_it_raised(model, error), "", None) from error
    finally:
        recorder.remove()
    return Inspection(model, recorder.inventory, random_model.source, None)


def _ended(code: object, found: Inspection | None) -> RunFailedError:
    """By ``sys.exit(code)``, where ``code`` may be what Python prints before it ends with 1."""
    number, output = (code, "") if isinstance(code, int) else (1, f"{code}\n")
    message = f"the script ended with exit code {number} before"
    if found is None:
        return RunFailedError(f"{message} it made a DeepSpeed engine", output, None, number)
    if found.inventory.forward_ms is None or not found.inventory.records:
        return RunFailedError(f"{message} a forward with gradients was over", output, None, number)
    message += " its micro-batches were over; what is shown was saved until then"
    return RunFailedError(message, output, found, number)


def _failure(error: Exception, found: Inspection | None, traceback: str, what: str, remedy: str) -> RunFailedError:
    """``found`` is shown where memory was all that lacked."""
    if not ran_out_of_memory(error):
        message = f"{what} raised {type(error).__name__} before its micro-batches were over"
        return RunFailedError(message, traceback, None)
    message = f"{what} ran out of device memory before a micro-batch was over; {remedy}"
    if found is None or not found.inventory.records:
        return RunFailedError(message, traceback, None)
    if found.inventory.forward_ms is None:
        found = replace(found, incomplete="device memory ran out in the first forward")
    else:
        message = f"{what} ran out of device memory; what is shown was saved before that; {remedy}"
    return RunFailedError(message, traceback, found)


def become_single_rank() -> None:
    """What a launcher would have set for one rank, unless a launcher has set it."""
    if "RANK" in os.environ:
        return
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
