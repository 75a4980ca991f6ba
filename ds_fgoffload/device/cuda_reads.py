"""Blocking reads of a CUDA device by the host, which torch tells of on request (``torch.cuda.set_sync_debug_mode``)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch


class CudaReads:
    """Tells of them, while someone watches: each is a warning, which torch gives when the read is over.

    The warning is not shown.
    """

    _message = "called a synchronizing CUDA operation"

    def __init__(self) -> None:
        self._watchers: dict[int, Callable[[], None]] = {}
        self._show = warnings.showwarning

    def watch(self, watcher: object, seen: Callable[[], None] | None) -> None:
        """From now on ``seen`` is called after each read, by the thread that reads. None: no longer."""
        before = bool(self._watchers)
        if seen is None:
            self._watchers.pop(id(watcher), None)
        else:
            self._watchers[id(watcher)] = seen
        if before == bool(self._watchers):
            return
        if not before and torch.cuda.get_sync_debug_mode() == 0:  # else the user is looking for them
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a prototype
                torch.cuda.set_sync_debug_mode("warn")
            warnings.filterwarnings("always", self._message)
            self._show, warnings.showwarning = warnings.showwarning, self._shown
        elif before and warnings.showwarning == self._shown:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self._show
            filters = cast("list[Any]", warnings.filters)
            filters[:] = [entry for entry in filters if not _is_filter_of(entry, self._message)]

    def _shown(self, message: Warning | str, *rest: Any, **more: Any) -> None:
        if str(message).startswith(self._message):
            for seen in tuple(self._watchers.values()):
                seen()
        else:
            self._show(message, *rest, **more)


def _is_filter_of(entry: Any, message: str) -> bool:
    return entry[1] is not None and getattr(entry[1], "pattern", entry[1]) == message


cuda_reads = CudaReads()
