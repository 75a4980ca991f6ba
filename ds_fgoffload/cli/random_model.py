"""A model of transformers with random weights: what ``ds-fgoffload inspect --transformers`` runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from ds_fgoffload.device.streams import accelerator_device, free_device_bytes
from ds_fgoffload.errors import OffloadConfigError, OffloadStateError
from ds_fgoffload.text.sizes import human

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_ALLOWED = "allowed: a model type such as qwen3, or a config.json, with --set for its keys"
_MOST_CHARACTERS = 300
"""Of an error of transformers, which may list all that it knows."""

_FEW_TOKENS = 512
_SLOW_ON_CPU = 2e12
"""Floating point operations: tens of seconds on a few cores."""


@dataclass(frozen=True)
class RandomModel:
    """A causal language model of transformers with random weights, and one micro-batch for it."""

    source: str
    """A model type (``qwen3``), or the path of a config.json or of its folder."""
    overrides: Mapping[str, Any]
    tokens: int
    batch: int
    dtype: str
    checkpointing: bool

    def announced(self, parameters: int, size_bytes: int, micro_batches: int, device: torch.device) -> Iterator[str]:
        """Lines about what is going to be run."""
        sequences = f"{self.batch} x " if self.batch > 1 else ""
        yield (
            f"{self.source}: {_count(parameters)} parameters, {human(size_bytes)}; {micro_batches} "
            f"micro-batch{'es' if micro_batches > 1 else ''} of {sequences}{self.tokens} tokens on {device.type}"
        )
        operations = 6 * parameters * self.tokens * self.batch * micro_batches  # of matrices, forward and backward
        if device.type == "cpu" and operations > _SLOW_ON_CPU and self.tokens > _FEW_TOKENS:
            yield (
                f"on a CPU this may take minutes: give it fewer tokens (--tokens {_FEW_TOKENS}); what is saved is in "
                "proportion"
            )

    def build(self, tell_size: Callable[[int, int], None] = lambda _parameters, _bytes: None) -> nn.Module:
        """The model in training mode; ``tell_size`` is given its parameters and their bytes before they take memory.

        Raises:
            OffloadConfigError: transformers does not take the configuration.
            OffloadStateError: there is no transformers, or too little memory.
        """
        if self.dtype not in _DTYPES:
            raise OffloadConfigError(f"--dtype {self.dtype}: allowed: {', '.join(_DTYPES)}")
        dtype = getattr(torch, self.dtype)
        try:
            import transformers
        except ImportError:
            raise OffloadStateError("--transformers needs the package transformers: pip install transformers") from None
        try:
            config = self._configuration(transformers)
            with torch.device("meta"):
                shape = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            weight_bytes = sum(p.numel() * p.element_size() for p in shape.parameters())
            self._refuse_if_too_large(weight_bytes)
            tell_size(sum(p.numel() for p in shape.parameters()), weight_bytes)
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (OffloadConfigError, OffloadStateError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each model has its own way to raise at a key that it cannot have
            raise OffloadConfigError(f"--transformers {self.source}: {_shortened(error)}; {_ALLOWED}") from error
        config.use_cache = False
        if self.checkpointing:
            # transformers 6 knows the first name only, transformers 4 the second
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()  # type: ignore[operator]
        return model.train().to(accelerator_device())

    def _configuration(self, transformers: Any) -> Any:
        """That of ``source`` with ``overrides``, none of which is unknown to it."""
        kinds = transformers.AutoConfig
        if Path(self.source).exists():
            make = partial(kinds.from_pretrained, self.source, local_files_only=True)
        elif self.source in transformers.CONFIG_MAPPING:
            make = partial(kinds.for_model, self.source)
        else:
            near = difflib.get_close_matches(self.source, list(transformers.CONFIG_MAPPING), n=3)
            hint = f" (nearest: {', '.join(near)})" if near else ""
            raise OffloadConfigError(
                f"--transformers {self.source}: no such model type{hint} and no such file; {_ALLOWED}"
            )
        known = make()
        if type(known) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise OffloadConfigError(
                f"--transformers {self.source}: transformers has no causal language model for it; {_ALLOWED}"
            )
        for key in self.overrides:
            if not hasattr(known, key):
                nearest = difflib.get_close_matches(key, known.to_dict(), n=1)
                hint = f'; did you mean "{nearest[0]}"?' if nearest else ""
                raise OffloadConfigError(f'--set {key}: the configuration of {self.source} has no "{key}"{hint}')
        return make(**self.overrides)

    def _refuse_if_too_large(self, weight_bytes: int) -> None:
        """Before anything is allocated."""
        left_bytes = min(psutil.virtual_memory().available, free_device_bytes())
        if 2 * weight_bytes > left_bytes:
            raise OffloadStateError(
                f"--transformers {self.source}: weights and gradients take {human(2 * weight_bytes)}, and "
                f"{human(left_bytes)} of memory are free; give it fewer layers (--set num_hidden_layers=2), which save "
                "the same each, or another --dtype"
            )

    def run(self, model: nn.Module) -> None:
        """One forward and backward."""
        vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
        ids = torch.randint(vocabulary, (self.batch, self.tokens), device=accelerator_device())
        model(input_ids=ids, labels=ids).loss.backward()

    def why_it_raised(self, model: nn.Module, error: Exception) -> str:
        """What to say of ``error``, which :meth:`run` raised, and what to do."""
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[operator, union-attr]
        what = f"--transformers {self.source}"
        hint = "; see whether a key given with --set caused it" if self.overrides else ""
        if isinstance(positions, int) and self.tokens > positions:
            return (
                f"{what}: the model has {positions} positions, and --tokens is {self.tokens}; give it fewer --tokens, "
                f"at most {positions} ({_shortened(error)})"
            )
        return f"{what}: a micro-batch raised {_shortened(error)}{hint}"


def _shortened(error: Exception) -> str:
    """In one line, with its kind where that says more."""
    text = " ".join(str(error).split())
    if not isinstance(error, ValueError | OSError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS].rstrip()} ..."


def _count(number: int) -> str:
    for power, letter in ((9, "B"), (6, "M")):
        if number >= 10**power:
            return f"{number / 10**power:.1f} {letter}"
    return str(number)
