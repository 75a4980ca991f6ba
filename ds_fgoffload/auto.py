"""``import ds_fgoffload.auto``: from then on ``deepspeed.initialize`` is :func:`ds_fgoffload.initialize`.

For notebooks and for scripts of which one line may change. It must come before anything that does ``from deepspeed
import initialize``; Accelerate and transformers look the function up when they call it.
"""

from __future__ import annotations

import functools
from typing import Any

import deepspeed

from ds_fgoffload import api

_MARK = "_ds_fgoffload_original"


def enable() -> None:
    """What the import does; again, it does nothing."""
    original = deepspeed.initialize
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        return api.initialize_with(original, *args, **kwargs)

    setattr(initialize, _MARK, original)
    deepspeed.initialize = initialize


def disable() -> None:
    """``deepspeed.initialize`` is DeepSpeed's own again. Engines that were made keep what is attached to them."""
    deepspeed.initialize = getattr(deepspeed.initialize, _MARK, deepspeed.initialize)


enable()
