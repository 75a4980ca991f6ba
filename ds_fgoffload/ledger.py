"""What every rank on this node holds of its memory: one small file per user, without a server.

The bottom of the host pool's budget: before a pool takes a slab it writes here that it will, unless the sum over the
node would exceed the budget; after it has given a slab back it writes that. The file lies in shared memory. Nothing
stays open, nothing is mapped, and the last pool that leaves removes it (:mod:`~ds_fgoffload.ledger_file`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ds_fgoffload.ledger_file import (
    LedgerBusyError,
    LedgerError,
    LedgerFile,
    NodeEntry,
    opened,
    pid_namespace,
    start_of,
)

__all__ = ["Ledger", "LedgerBusyError", "LedgerError", "NodeEntry", "default_path", "read_node"]

DIRECTORY_VARIABLE = "DS_FGOFFLOAD_LEDGER_DIR"
"""The environment variable that names the directory of the file, for nodes on which no usual one will do."""

DIRECTORIES = ("/dev/shm", "/tmp", tempfile.gettempdir())  # noqa: S108 - links are not followed, owners are checked

_pool_numbers = itertools.count(1)


class Ledger:
    """The row of one pool, and the sum of all.

    ``path`` is the file, by default :func:`default_path`. Methods raise :class:`LedgerError` if the file cannot be had
    within a second.
    """

    def __init__(self, path: Path | None = None, *, program: str = "") -> None:
        self._path = path
        self._pid = os.getpid()
        self._mine = NodeEntry(
            pid=self._pid,
            started=start_of(self._pid) or 0,
            pid_namespace=pid_namespace(),
            pool=next(_pool_numbers),
            rank=int(os.environ.get("RANK") or -1),
            pinned_bytes=0,
            leased_bytes=0,
            limit_bytes=0,
            share_bytes=0,
            wanted_bytes=0,
            seen_s=0.0,
            name=program,
        )

    @cached_property
    def path(self) -> Path:
        """The file, which need not be there."""
        return default_path() if self._path is None else self._path

    def hold(self, pinned_bytes: int, node_limit_bytes: int | None = None) -> int | None:
        """Writes that this pool holds ``pinned_bytes`` from now on; returns ``None`` if it may.

        If all pools together would then hold more than ``node_limit_bytes``, it is only written what was wanted, and
        what the others hold is returned.
        """
        with opened(self.path) as file:
            mine = self._mine
            others_bytes = sum(row.pinned_bytes for row in self._others(file))
            refused = node_limit_bytes is not None and others_bytes + pinned_bytes > node_limit_bytes
            if refused:
                wanted_bytes = pinned_bytes - mine.pinned_bytes if pinned_bytes <= mine.share_bytes else 0
                self._mine = replace(mine, wanted_bytes=wanted_bytes)
            else:
                self._mine = replace(mine, pinned_bytes=pinned_bytes, wanted_bytes=0)
            self._write(file)
            return others_bytes if refused else None

    def describe(self, *, limit_bytes: int, share_bytes: int) -> None:
        """What the next write tells of this pool's bounds."""
        self._mine = replace(self._mine, limit_bytes=limit_bytes, share_bytes=share_bytes)

    def publish(self, leased_bytes: int) -> list[NodeEntry]:
        """Writes what is on lease; returns the rows of the others."""
        self._mine = replace(self._mine, leased_bytes=leased_bytes)
        with opened(self.path) as file:
            others = self._others(file)
            self._write(file)
            return others

    def others(self) -> list[NodeEntry]:
        """The rows of the other pools that are alive."""
        if not self.path.exists():
            return []
        with opened(self.path) as file:
            return self._others(file)

    def leave(self) -> None:
        """Takes this pool's row out, and the file away if it was the last."""
        if os.getpid() != self._pid or not self.path.exists():
            return
        with contextlib.suppress(LedgerError), opened(self.path) as file:
            for index, row in file.rows():
                if self._is_mine(row):
                    file.clear(index)
            self._mine = replace(self._mine, pinned_bytes=0, leased_bytes=0, wanted_bytes=0)
            if not file.live_rows():
                self.path.unlink(missing_ok=True)

    def _others(self, file: LedgerFile) -> list[NodeEntry]:
        return [row for _, row in file.live_rows() if not self._is_mine(row)]

    def _write(self, file: LedgerFile) -> None:
        self._mine = replace(self._mine, seen_s=time.monotonic())
        index = next((index for index, row in file.rows() if self._is_mine(row)), None)
        file.write(file.free_index() if index is None else index, self._mine)

    def _is_mine(self, row: NodeEntry) -> bool:
        mine = self._mine
        return (row.pid, row.started, row.pid_namespace, row.pool) == (
            mine.pid,
            mine.started,
            mine.pid_namespace,
            mine.pool,
        )


def read_node(path: Path | None = None) -> list[NodeEntry]:
    """The pools of this user that are alive on this node; ``[]`` if there is no ledger. Changes nothing.

    Raises :class:`LedgerError` if it cannot be read.
    """
    path = default_path() if path is None else path
    try:
        with opened(path, create=False) as file:
            return [row for _, row in file.rows() if row.is_alive()]
    except LedgerError:
        if path.exists():
            raise
        return []


def default_path() -> Path:
    """The file of this user: in shared memory, else in a temporary directory where such a file can be had."""
    name = f"ds_fgoffload-{os.geteuid()}.ledger"
    named = os.environ.get(DIRECTORY_VARIABLE)
    directories = [named] if named else DIRECTORIES
    for directory in directories[:-1]:
        path = Path(directory, name)
        try:
            existed = path.exists()
            with opened(path):
                pass
        except LedgerError:
            continue
        if not existed:
            _remove_if_empty(path)
        return path
    return Path(directories[-1], name)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(LedgerError), opened(path) as file:
        if not file.live_rows():
            path.unlink(missing_ok=True)
