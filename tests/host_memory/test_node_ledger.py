"""What the pools of one node tell each other: rows, the sum, the dead, who may read, and what is left behind."""

import fcntl
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from ds_fgoffload.host_memory import node_ledger as ledger_file
from ds_fgoffload.host_memory import node_ledger as ledger_module
from ds_fgoffload.host_memory.node_ledger import Ledger, LedgerError, default_path, read_node

MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


def in_a_child(work):
    """Runs ``work`` in a forked process; returns its pid when it is done and waits to be killed."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        work()
        os.write(tell, b"x")
        signal.pause()
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(tell)
    return child


def bury(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_sum_over_all_pools_stays_within_the_budget(path):
    first, second = Ledger(path), Ledger(path)
    assert first.hold(60, 100) is None
    assert second.hold(41, 100) == 60
    assert second.hold(40, 100) is None
    assert first.hold(61, 100) == 40
    assert first.hold(10) is None
    assert second.hold(90, 100) is None
    assert sorted(entry.pinned_bytes for entry in read_node(path)) == [10, 90]


def test_rows_tell_what_top_wants_to_know(path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    ledger = Ledger(path, program="train.py")
    ledger.describe(limit_bytes=100, share_bytes=50)
    ledger.hold(40, 100)
    ledger.publish(leased_bytes=30)
    (entry,) = read_node(path)
    assert (entry.pid, entry.rank, entry.name) == (os.getpid(), 3, "train.py")
    assert (entry.pinned_bytes, entry.leased_bytes, entry.limit_bytes, entry.share_bytes) == (40, 30, 100, 50)
    assert time.monotonic() - entry.seen_s < 5


def test_what_was_wanted_within_the_share_is_written_until_it_is_had(path):
    rich, poor = Ledger(path), Ledger(path)
    rich.hold(80, 100)
    poor.describe(limit_bytes=100, share_bytes=50)
    poor.hold(10, 100)
    assert poor.hold(60, 100) == 80  # more than its share: nobody is asked
    assert [row.wanted_bytes for row in rich.others()] == [0]
    assert poor.hold(40, 100) == 80
    assert [row.wanted_bytes for row in rich.others()] == [30]
    rich.hold(50)
    assert poor.hold(40, 100) is None
    assert [row.wanted_bytes for row in rich.others()] == [0]


def test_the_last_to_leave_removes_the_file_and_comes_back_if_it_must(path):
    first, second = Ledger(path), Ledger(path)
    first.hold(1)
    second.hold(1)
    first.leave()
    first.leave()
    assert [entry.pinned_bytes for entry in read_node(path)] == [1]
    second.leave()
    assert not path.exists()
    assert (read_node(path), first.others()) == ([], [])
    first.hold(2)
    assert [entry.pinned_bytes for entry in read_node(path)] == [2]
    first.leave()


def test_the_dead_are_cleared_also_before_their_parent_has_waited_for_them(path):
    ledger = Ledger(path)
    child = in_a_child(lambda: Ledger(path).hold(90, 100))
    assert ledger.hold(20, 100) == 90
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # dead, and not buried
    assert ledger.hold(20, 100) is None
    os.waitpid(child, 0)
    ledger.leave()
    assert not path.exists()


def test_a_pid_that_was_used_again_is_another_process(path, monkeypatch):
    ledger = Ledger(path)
    ledger.hold(90, 100)
    monkeypatch.setattr(ledger_file, "start_of", lambda pid: 1)
    assert read_node(path) == []


def test_a_row_from_another_container_counts_as_long_as_it_gives_signs_of_life(path, monkeypatch):
    monkeypatch.setattr(ledger_module, "pid_namespace", lambda: 7)
    Ledger(path).hold(90, 100)
    monkeypatch.undo()
    mine = Ledger(path)
    assert mine.hold(20, 100) == 90
    now = time.monotonic() + 100
    monkeypatch.setattr(ledger_file.time, "monotonic", lambda: now)
    assert mine.hold(20, 100) is None


def test_more_rows_than_the_file_began_with(path):
    ledgers = [Ledger(path) for _ in range(40)]
    for ledger in ledgers:
        ledger.hold(1)
    assert len(read_node(path)) == 40
    for ledger in ledgers:
        ledger.leave()
    assert not path.exists()


def test_only_this_user_can_read_the_file(path):
    before = os.umask(0)
    try:
        Ledger(path).hold(1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["readable", "link", "directory"])
def test_a_file_that_is_not_ours_alone_is_not_used(path, tmp_path, kind):
    if kind == "readable":
        path.touch(0o644)
        path.chmod(0o644)
    elif kind == "link":
        (tmp_path / "other").touch(0o600)
        path.symlink_to(tmp_path / "other")
    else:
        path.mkdir()
    with pytest.raises(LedgerError, match=str(path)):
        Ledger(path).hold(1)


def test_a_full_or_missing_directory_is_passed_over(tmp_path, monkeypatch):
    full, good = tmp_path / "full", tmp_path / "good"
    full.mkdir()
    good.mkdir()
    real = os.posix_fallocate

    def fallocate(descriptor, offset, size):
        if full in Path(f"/proc/self/fd/{descriptor}").readlink().parents:
            raise OSError(28, "No space left on device")
        real(descriptor, offset, size)

    monkeypatch.setattr(ledger_file.os, "posix_fallocate", fallocate)
    monkeypatch.setattr(ledger_module, "DIRECTORIES", (str(tmp_path / "none"), str(full), str(good), "/nowhere"))
    path = default_path()
    assert path.parent == good
    assert [*full.iterdir(), *good.iterdir()] == []  # looking leaves nothing
    Ledger().hold(5)
    assert [entry.pinned_bytes for entry in read_node()] == [5]
    monkeypatch.setenv(ledger_module.DIRECTORY_VARIABLE, str(tmp_path))
    assert default_path().parent == tmp_path


def test_nobody_waits_for_ever_for_a_process_that_was_stopped(path, monkeypatch):
    monkeypatch.setattr(ledger_file, "_BUSY_S", 0.05)
    ledger = Ledger(path)
    ledger.hold(1)

    def lock():
        descriptor = os.open(path, os.O_RDWR)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)

    child = in_a_child(lock)
    with pytest.raises(LedgerError, match="locked by another process"):
        ledger.hold(2, 100)
    bury(child)
    assert ledger.hold(2, 100) is None


def test_threads_of_a_process_take_turns(path):
    ledgers = [Ledger(path) for _ in range(4)]
    granted = []

    def work(ledger):
        mine = 0
        for _ in range(50):
            if ledger.hold(mine + 1, 60) is None:
                mine += 1
        granted.append(mine)

    threads = [threading.Thread(target=work, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 60


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_stays_open(path):
    before = descriptors()
    ledger = Ledger(path)
    ledger.hold(1)
    read_node(path)
    ledger.leave()
    assert descriptors() == before
