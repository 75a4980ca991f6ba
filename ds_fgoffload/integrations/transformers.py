"""A callback for the Trainer of transformers (and TRL): offloading in one line, the report when training ends."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ds_fgoffload import api
from ds_fgoffload.config import find_section, parse_config
from ds_fgoffload.engines.adapter import engine_of
from ds_fgoffload.errors import OffloadConfigError

_made: weakref.WeakSet[api.Attachment] = weakref.WeakSet()


class OffloadCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Give it to the Trainer: ``Trainer(..., callbacks=[OffloadCallback()])``.

    When training begins, it attaches to the DeepSpeed engine that the Trainer has made, or to the model itself. When
    training ends, the report is printed and offloading is taken off. With ``"enabled": false`` it does nothing.

    Args:
        section: the ``fine_grained_offload`` section. Default: the one in the ds_config.

    Raises:
        OffloadConfigError: when training begins, if there is neither a section here nor in the ds_config.
    """

    def __init__(self, section: Mapping[str, Any] | None = None) -> None:
        self._section = section
        self.attachment: api.Attachment | None = None
        """From the beginning of a training on; that of the last one when it has ended."""

    def on_train_begin(
        self, _arguments: Any, _state: Any, _control: Any, *, model: nn.Module, optimizer: object = None, **_: Any
    ) -> None:
        """The engine exists by now, if there is to be one."""
        engine = engine_of(model, optimizer)
        target = model if engine is None else engine
        found = api.get(target)
        if found is not None and found in _made:  # by a training that has not come to its end
            found.detach()
            found = None
        self.attachment = self._attach(target, engine) if found is None else found

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Every rank comes here."""
        if self.attachment is not None:
            self.attachment.print_report()
            self.attachment.detach()

    def _attach(self, target: nn.Module, engine: Any) -> api.Attachment | None:
        section = self._section
        if section is None and engine is not None:
            section = find_section(engine.config)
        if section is None:
            raise OffloadConfigError(
                "fine_grained_offload: the Trainer has made no DeepSpeed engine with such a section; put one into its "
                'DeepSpeed configuration, or give it to the callback: OffloadCallback({"modules": ["@mlp"]})'
            )
        if not parse_config(section).enabled:
            return None
        attachment = api.attach(target, section)
        _made.add(attachment)
        return attachment
