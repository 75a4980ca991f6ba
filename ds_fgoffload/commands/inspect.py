"""``ds-fgoffload inspect``: what a model saves for backward, module by module, and what each pattern would move."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ds_fgoffload import api
from ds_fgoffload.commands.random_model import RandomModel
from ds_fgoffload.config import SECTION, FineGrainedOffloadConfig, find_section
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.inventory import Inventory
from ds_fgoffload.script import UserScript
from ds_fgoffload.sizes import parse_size
from ds_fgoffload.streams import accelerator_device, make_streams
from ds_fgoffload.watcher import Watcher


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


class _Enough(BaseException):
    """As many micro-batches as were asked for have run."""


class _NoEngine(BaseException):
    """The script trains, and not with DeepSpeed."""


class _Watch:
    """Puts a recorder on the first engine that the script makes, and ends the script after ``micro_batches``.

    Also ends it where it trains with no engine: it would go on to its end, and there would be nothing to tell.
    """

    def __init__(self, micro_batches: int) -> None:
        self.engine: Any = None
        self.recorder: Watcher | None = None
        self._left = micro_batches
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

    def _micro_batch_begins(self) -> None:
        if not self._left:
            raise _Enough
        self._left -= 1
        if attachment := api.get(self.engine):  # the innermost hooks alone would see what the units save
            attachment.detach()


def inspect_script(arguments: Sequence[str], micro_batches: int) -> Inspection:
    """Runs a script until its first engine has done ``micro_batches``; the last of them is told about.

    Raises:
        OffloadStateError: it made no engine, or ran too few micro-batches.
    """
    script = UserScript.of(arguments)
    if script is None:
        raise OffloadStateError("no script to run: give a script.py or -m package.module, and its arguments")
    become_single_rank()
    watch = _Watch(micro_batches)
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
    if watch.recorder is None:
        raise OffloadStateError(
            f"{script.target} ended without calling deepspeed.initialize, and only a model that an engine was made of "
            "is seen; for a model without DeepSpeed use --transformers, or start the script as it is started to train"
        )
    watch.recorder.remove()
    if not watch.recorder.inventory.records:
        raise OffloadStateError(
            f"{script.target}: no micro-batch with gradients has ended its forward, so nothing was saved to tell about"
        )
    section = find_section(watch.engine.config)
    return Inspection(watch.engine.module, watch.recorder.inventory, script.target, section)


def inspect_transformers(random_model: RandomModel, micro_batches: int) -> Inspection:
    """Builds the model and runs ``micro_batches`` of random tokens; the last is told about."""
    model = random_model.build()
    recorder = Watcher(model, make_streams(accelerator_device()))
    for _ in range(micro_batches):
        random_model.run(model)
    recorder.remove()
    return Inspection(model, recorder.inventory, random_model.source, None)


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
