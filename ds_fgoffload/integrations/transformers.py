"""A callback for the Trainer of transformers (and TRL): offloading in one line, the report when training ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ds_fgoffload import api
from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.script import initialize_replaced


class OffloadCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Give it to the Trainer: ``Trainer(..., callbacks=[OffloadCallback()])``.

    With DeepSpeed the engine is attached to as soon as the Trainer makes it; without, the model itself when training
    begins. The report is printed when training ends, and offloading is taken off.

    Args:
        section: the ``fine_grained_offload`` section. Default: the one in the ds_config.

    Raises:
        OffloadConfigError: when training begins, if there is neither a section here nor in the ds_config.
    """

    def __init__(self, section: Mapping[str, Any] | None = None) -> None:
        self._section = section
        self.attachment: api.Attachment | None = None
        """From the beginning of training on."""
        self._replaced = ExitStack()
        self._replaced.enter_context(initialize_replaced(self._initialize))

    def on_train_begin(self, _arguments: Any, _state: Any, _control: Any, *, model: nn.Module, **_: Any) -> None:
        """The engine exists by now, if there is to be one."""
        self._replaced.close()
        if self.attachment is None and self._section is not None:
            self.attachment = api.attach(model, self._section)
        if self.attachment is None:
            raise OffloadConfigError(
                "fine_grained_offload: the Trainer has made no DeepSpeed engine with such a section; put one into its "
                'DeepSpeed configuration, or give it to the callback: OffloadCallback({"modules": ["@mlp"]})'
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Every rank comes here."""
        if self.attachment is not None:
            self.attachment.print_report()
            self.attachment.detach()

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        if self._section is None:
            made = api.initialize_with(original, *args, **kwargs)
        else:
            made = original(*args, **kwargs)
            if api.get(made[0]) is None:  # nobody else has attached: ds_fgoffload.run, ds_fgoffload.auto
                api.attach(made[0], self._section)
        self.attachment = self.attachment or api.get(made[0])  # not a reference model's
        return made
