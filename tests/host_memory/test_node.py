"""Several processes on one node: the budget holds at every moment, seen from outside; nobody waits for the dead."""

import fcntl
import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch

from ds_fgoffload.host_memory import node_ledger as ledger_file
from ds_fgoffload.host_memory.node_ledger import Ledger, read_node
from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings

KIB, MIB = 1 << 10, 1 << 20
NODE_BYTES = 48 * MIB


def pool_at(path, **settings):
    settings = HostPoolSettings(node_max_bytes=NODE_BYTES, pin_memory=False, **settings)
    return HostPool(settings, ledger=Ledger(path), slab_bytes=64 * KIB)


def fork(work):
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        work()
    except BaseException:  # noqa: BLE001 - pytest must not go on in the child
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def pool_memory_bytes(pid):
    """What lies in memory of a process's regions: mappings that neither a fork nor a core dump copies."""
    found = resident = 0
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if line.startswith("Rss:"):
            resident = int(line.split()[1]) * KIB
        elif line.startswith("VmFlags:") and {"dc", "dd", "nr"} <= set(line.split()):
            found += resident
    return found


def train(path, seed, seconds):
    """Leases, writes, reads and gives back, as much as it gets; then leaves nothing."""
    numbers, live, refused = random.Random(seed), [], 0
    pool = pool_at(path)
    user = pool.add_user()
    until = time.monotonic() + seconds
    while time.monotonic() < until or not refused or not user.account.leases:  # a busy machine gets to it later
        if numbers.random() < 0.7 or not live:
            lease = user.lease(numbers.randrange(1, 6 * MIB))
            refused += lease is None
            if lease is not None:
                lease.memory.fill_(seed)
                live.append(lease)
        else:
            lease = live.pop(numbers.randrange(len(live)))
            assert bool((lease.memory == seed).all())
            lease.give_back()
        if numbers.random() < 0.05:
            while live:
                live.pop().give_back()
            pool.trim()
    assert refused
    assert user.account.leases
    for lease in live:
        lease.give_back()
    user.leave()
    until = time.monotonic() + 20
    while pool.stats().pinned_bytes:  # the housekeeping thread may be amid a slab
        assert time.monotonic() < until


@pytest.mark.parametrize("processes", [2, 8])
def test_the_budget_of_the_node_is_never_exceeded(tmp_path, processes):
    path = tmp_path / "ledger"
    children = [fork(lambda seed=seed: train(path, seed, seconds=1.5)) for seed in range(1, processes + 1)]
    most, samples = 0, 0
    running = list(children)
    while running:
        for child in running:
            os.kill(child, signal.SIGSTOP)  # so that nothing moves from one to the other while we look
        held = sum(pool_memory_bytes(child) for child in running)
        for child in running:
            os.kill(child, signal.SIGCONT)
        most, samples = max(most, held), samples + 1
        assert held <= NODE_BYTES
        assert sum(entry.pinned_bytes for entry in read_node(path)) <= NODE_BYTES
        time.sleep(0.02)
        running = [
            child for child in running if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * processes
    print(f"{processes} processes: at most {most / MIB:.1f} of {NODE_BYTES / MIB} MiB in {samples} looks")
    assert most > NODE_BYTES / 2
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_held_is_there_within_a_second(tmp_path):
    path = tmp_path / "ledger"

    def hold():
        lease = pool_at(path).lease(40 * MIB)
        os.write(tell, b"x")
        signal.pause()
        del lease

    ready, tell = os.pipe()
    child = fork(hold)
    assert os.read(ready, 1) == b"x"
    pool = pool_at(path)
    assert pool.lease(30 * MIB) is None
    for part in ("the other pools of the node hold", "50331648 bytes", "host_pool.node_max_bytes"):
        assert part in pool.last_refusal
    os.kill(child, signal.SIGKILL)
    begin = time.monotonic()
    while (lease := pool.lease(30 * MIB)) is None:
        assert time.monotonic() - begin < 1
        time.sleep(0.001)
    os.waitpid(child, 0)
    lease.give_back()
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_who_borrows_gives_back_what_is_free_when_another_wants_its_share(tmp_path):
    path = tmp_path / "ledger"
    borrower, late = pool_at(path), pool_at(path)
    used, free = borrower.lease(10 * MIB), borrower.lease(35 * MIB)
    free.give_back()
    assert late.lease(20 * MIB) is None
    borrower._do_housekeeping()
    assert borrower.stats().pinned_bytes < 11 * MIB  # the rest was one slab
    lease = late.lease(20 * MIB)
    assert lease is not None
    assert borrower.lease(30 * MIB) is None
    for one in (used, lease):
        one.give_back()
    borrower.close()
    late.close()
    assert list(tmp_path.iterdir()) == []


def test_without_a_ledger_file_a_pool_takes_its_share_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    pool = pool_at(tmp_path / "missing" / "ledger")
    assert pool.stats().share_bytes == 12 * MIB
    lease = pool.lease(12 * MIB)
    assert lease is not None
    assert pool.lease(MIB) is None
    assert "borrows no more" in pool.last_refusal
    lease.give_back()
    pool.close()


def test_while_the_ledger_is_locked_nothing_is_taken_but_nobody_waits_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_file, "_BUSY_S", 0.05)
    path = tmp_path / "ledger"
    pool = pool_at(path)
    first = pool.lease(KIB)

    def lock():
        descriptor = os.open(path, os.O_RDWR)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        os.write(tell, b"x")
        signal.pause()

    ready, tell = os.pipe()
    child = fork(lock)
    assert os.read(ready, 1) == b"x"
    assert pool.lease(MIB) is None
    assert "locked by another process" in pool.last_refusal
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    second = pool.lease(MIB)
    for lease in (first, second):
        lease.give_back()
    pool.close()


def test_the_end_of_the_interpreter_leaves_nothing(tmp_path):
    path = tmp_path / "ledger"

    def work():
        pool = pool_at(path)
        lease = pool.lease(MIB)
        assert path.exists()
        del lease
        pool.end()

    child = fork(work)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(tmp_path.iterdir()) == []
