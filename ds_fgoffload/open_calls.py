"""Calls of hooked modules that have not returned: what has to be closed when they do, or when something goes wrong."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ds_fgoffload.offloader import Offloader
from ds_fgoffload.recompute import OpenedCall
from ds_fgoffload.scope import Scope


class OpenCall(NamedTuple):
    """A call that has begun."""

    owner: object
    """The module; of a unit under ``recompute`` the unit, of the root's forward its hooks."""
    scope: Scope | None
    hooks: AbstractContextManager[Any] | None
    """Autograd's, while they are entered."""
    recomputed: OpenedCall | None = None


class OpenCalls(threading.local):
    """A stack, outermost first; each thread runs its own."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._stack: list[OpenCall] = []

    def append(self, call: OpenCall) -> None:
        self._stack.append(call)

    def scope(self) -> Scope | None:
        """The innermost."""
        return next((call.scope for call in reversed(self._stack) if call.scope is not None), None)

    def saving(self) -> OpenCall | None:
        """The innermost around which autograd's hooks are entered."""
        return next((call for call in reversed(self._stack) if call.hooks is not None), None)

    def is_recomputed(self) -> bool:
        """Whether one of them will be made again in backward, with all that is in it."""
        return any(call.recomputed is not None for call in self._stack)

    def close(self, owner: object) -> OpenCall | None:
        """Closes the owner's call, and calls in it that were left open.

        None: it was never entered, because a hook of someone else raised before.
        """
        while any(call.owner is owner for call in self._stack):
            call = self._close_last()
            if call.owner is owner:
                return call
            _abandon(call)
        return None

    def close_all(self) -> None:
        while self._stack:
            _abandon(self._close_last())

    def _close_last(self) -> OpenCall:
        call = self._stack.pop()
        if call.hooks is not None:
            call.hooks.__exit__(None, None, None)
        if call.scope is not None:
            self._offloader.close_scope(call.scope)
        return call


def _abandon(call: OpenCall) -> None:
    if call.recomputed is not None:
        call.recomputed.abandon()
