"""Keeps what waits for backward from making Python collect all of its garbage, which takes tenths of a second.

CPython looks at the oldest objects when those that have lately become old come to a quarter of them, and a tracked
object becomes old when the second generation is collected while it lives; that falls due every seven thousand objects
or so (https://github.com/python/cpython/blob/3.12/Modules/gcmodule.c, ``gc_collect_generations``). What autograd holds
from forward to backward is dead soon after, but counts. Where the young are collected just before a forward, when few
of them live, nothing becomes old in the middle of it, up to that number.
"""

from __future__ import annotations

import gc
import sys

_HAS_GENERATIONS = sys.version_info < (3, 14)
"""From 3.14 on garbage is collected bit by bit."""


def collect_young() -> None:
    """Takes some tenths of a millisecond. Does nothing if the user has put an end to automatic collection."""
    if _HAS_GENERATIONS and gc.isenabled():
        gc.collect(1)
