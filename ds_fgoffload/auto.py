"""``import ds_fgoffload.auto``: from then on ``deepspeed.initialize`` is :func:`ds_fgoffload.initialize`.

For notebooks and for scripts of which one line may change. It must come before anything that does ``from deepspeed
import initialize``. It warns if it comes too late, and when the interpreter ends if nothing was offloaded.
Accelerate and transformers look the function up when they call it.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import deepspeed

from ds_fgoffload import api
from ds_fgoffload.reporting.tally import is_switched_off, tallies
from ds_fgoffload.text.messages import NOTHING_OFFLOADED, warn

_MARK, _WATCH = "_ds_fgoffload_original", "_ds_fgoffload_watch"
_FIRST = "import ds_fgoffload.auto first, before `from deepspeed import initialize`"


def enable() -> None:
    """What the import does; again, it does nothing."""
    original = deepspeed.initialize
    if hasattr(original, _MARK):
        return
    watch = _Watch()

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        watch.has_failed = True
        made = api.initialize_with(original, *args, **kwargs)
        watch.has_failed = False
        return made

    setattr(initialize, _MARK, original)
    deepspeed.initialize = initialize
    if not hasattr(original, "__wrapped__"):  # else it is ds_fgoffload.run's, which tells by itself
        _warn_if_late(original)
        atexit.register(watch.end)
        setattr(initialize, _WATCH, watch)


def disable() -> None:
    """``deepspeed.initialize`` is DeepSpeed's own again. Engines that were made keep what is attached to them."""
    watch = getattr(deepspeed.initialize, _WATCH, None)
    if watch is not None:
        atexit.unregister(watch.end)
    deepspeed.initialize = getattr(deepspeed.initialize, _MARK, deepspeed.initialize)


class _Watch:
    """Sees at the end of the interpreter whether there was anything to offload from."""

    def __init__(self) -> None:
        self.has_failed = False
        """The latest engine was not made: the user has an error to read."""
        self._pid = os.getpid()

    def end(self) -> None:
        is_forked = os.getpid() != self._pid
        if _deepspeed_was_initialized() and not (is_forked or self.has_failed or tallies() or is_switched_off()):
            warn(f"{NOTHING_OFFLOADED}; {_FIRST}. ds_fgoffload.get(engine) is None for an engine without offloading")


def _warn_if_late(original: Callable[..., Any]) -> None:
    if _deepspeed_was_initialized() and not tallies():
        warn(
            "fine_grained_offload: ds_fgoffload.auto is imported after deepspeed.initialize was called, and nothing is "
            f"offloaded from the engine made there: {_FIRST}, or give it to ds_fgoffload.attach"
        )
        return
    if multiprocessing.parent_process() is not None or hasattr(multiprocessing.current_process(), "_inheriting"):
        return  # a data loader's worker that was spawned imports the script again, and need not say so again
    holders = [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] != "deepspeed"
        and any(value is original for value in list(getattr(module, "__dict__", {}).values()))
    ]
    if holders:
        warn(
            f"fine_grained_offload: {holders[0]} took `initialize` from deepspeed before ds_fgoffload.auto was "
            f"imported, and nothing will be offloaded from engines that it makes: {_FIRST}"
        )


def _deepspeed_was_initialized() -> bool:
    """In this process, or in the one that it is a fork of."""
    return getattr(deepspeed, "dist", None) is not None  # which deepspeed.initialize sets


enable()
