"""The node ledger: what every rank on this node holds of its memory, in one small file per user, without a server.

Before a pool takes a slab it writes here that it will, unless the sum over the node would exceed the budget; after it
has given a slab back it writes that. The file lies in shared memory and has rows of fixed size. It is opened for each
look and closed after it, under a lock that the kernel drops if its holder dies; nothing is mapped. Only its owner
writes a row; whoever looks clears the rows of processes that have died. The last pool that leaves removes the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

_ROW = struct.Struct("<QQQQqQQQQQd40s")
_FIRST_ROWS = 32
_BUSY_S = 1.0  # a stopped process may hold the lock for ever: nobody waits longer than this
_FOREIGN_ALIVE_S = 60.0
_one_at_a_time = threading.Lock()  # a process's own file locks do not exclude its threads


class LedgerError(OSError):
    """The node's ledger cannot be read or written."""


class LedgerBusyError(LedgerError):
    """Somebody has held the lock for longer than anybody should wait, perhaps a process that was stopped."""


@dataclass(frozen=True)
class NodeEntry:
    """One pool on this node; sizes in bytes."""

    pid: int
    started: int
    """When the process started, in clock ticks since boot: a pid that was used again has another."""
    pid_namespace: int
    pool: int
    """The number of the pool in its process."""
    rank: int
    """``RANK``, or -1 outside a launcher."""
    pinned_bytes: int
    leased_bytes: int
    """As of a second ago."""
    limit_bytes: int
    share_bytes: int
    """What this pool may always have; beyond it, it borrows what others leave."""
    wanted_bytes: int
    """What it asked for last and did not get, within its share: those who borrow give back."""
    seen_s: float
    """When its owner last wrote, on the system's monotonic clock."""
    name: str
    """Of the program."""

    def is_alive(self) -> bool:
        """Whether its process is there, by pid and start; by its last sign of life if it is in another container."""
        if self.pid_namespace != pid_namespace():
            return 0 <= time.monotonic() - self.seen_s < _FOREIGN_ALIVE_S
        return start_of(self.pid) == self.started


class LedgerFile:
    """The open file, whose lock is held."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def rows(self) -> Iterator[tuple[int, NodeEntry]]:
        content = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        for index in range(len(content) // _ROW.size):
            fields = _ROW.unpack_from(content, index * _ROW.size)
            if fields[0]:
                row = NodeEntry(*fields)
                yield index, replace(row, name=fields[-1].rstrip(b"\0").decode(errors="replace"))

    def live_rows(self) -> list[tuple[int, NodeEntry]]:
        """All rows, without those of the dead, which are cleared."""
        live = []
        for index, row in self.rows():
            if row.is_alive():
                live.append((index, row))
            else:
                self.clear(index)
        return live

    def free_index(self) -> int:
        used = {index for index, _ in self.rows()}
        return next(index for index in itertools.count() if index not in used)

    def write(self, index: int, row: NodeEntry) -> None:
        name = row.name.encode()[:40]
        numbers: Sequence[int | float] = list(vars(row).values())[:-1]
        os.pwrite(self._descriptor, _ROW.pack(*numbers, name), index * _ROW.size)

    def clear(self, index: int) -> None:
        os.pwrite(self._descriptor, bytes(_ROW.size), index * _ROW.size)


@contextlib.contextmanager
def opened(path: Path, *, create: bool = True) -> Iterator[LedgerFile]:
    """The file, locked: for writing, or for reading what there is if not ``create``."""
    if not _one_at_a_time.acquire(timeout=_BUSY_S):
        raise LedgerBusyError(f"{path} is in use by another thread of this process")
    try:
        descriptor = _locked(path, create=create)
        try:
            yield LedgerFile(descriptor)
        finally:
            os.close(descriptor)  # and with it goes the lock
    except LedgerError:
        raise
    except OSError as error:  # the file system has no room for one row more, or the file is not ours
        raise LedgerError(f"{path}: {error}") from error
    finally:
        _one_at_a_time.release()


def _locked(path: Path, *, create: bool) -> int:
    until = time.monotonic() + _BUSY_S
    while True:
        descriptor = _open(path, create=create)
        try:
            fcntl.lockf(descriptor, (fcntl.LOCK_EX if create else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            if time.monotonic() > until:
                raise LedgerBusyError(f"{path} is locked by another process for more than {_BUSY_S} s") from None
            time.sleep(0.0005)
            continue
        if not create or _is_still_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its last user removed it before we had the lock


def _open(path: Path, *, create: bool) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{path} is not a file that only this user can read and write")
        if create and found.st_size < _FIRST_ROWS * _ROW.size:
            os.posix_fallocate(descriptor, 0, _FIRST_ROWS * _ROW.size)  # a full file system tells it here
    except OSError as error:
        if error.errno == errno.ENOSPC and os.fstat(descriptor).st_size == 0:
            path.unlink()
        os.close(descriptor)
        raise
    return descriptor


def _is_still_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def start_of(pid: int) -> int | None:
    """When the process started, in ticks since boot; ``None`` if it is not there, or only its corpse is."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def pid_namespace() -> int:
    """Containers may share the file, but not their pids."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _after_fork() -> None:
    global _one_at_a_time  # noqa: PLW0603 - a thread of the parent may have held it
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


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
