"""Runs functions on several gloo CPU ranks, each a fresh process, and brings back what they return or how they fail.

To import DeepSpeed costs seconds, so one server imports it, and every rank is a fork of that server. To make a group
costs as well, so :func:`run_cases` runs many cases in one set of processes. A case that fails ends its processes, since
its peers may wait for it in a collective; the cases after it get new ones.
"""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_GRACE_S = 3.0  # for the peers of a rank that failed: those that fail too are shown as well
_MOST_FAILURES = 3


class RanksFailed(AssertionError):
    """A rank raised, died or did not end in time; the message has its traceback."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case: what each rank returned, or why there is nothing."""

    results: tuple[Any, ...] = ()
    failure: str | None = None

    def check(self) -> tuple[Any, ...]:
        """The results by rank. Raises :class:`RanksFailed`."""
        if self.failure is not None:
            raise RanksFailed(self.failure)
        return self.results


def run_on_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 2, timeout_s: float = 240) -> list[Any]:
    """What ``function(*arguments)`` returns on each rank. Raises :class:`RanksFailed`."""
    outcomes = run_cases(function, {"": arguments}, ranks=ranks, timeout_s=timeout_s)
    return list(outcomes[""].check())


def run_cases(
    function: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]], *, ranks: int = 2, timeout_s: float = 240
) -> dict[str, Outcome]:
    """Runs ``function(*arguments)`` for each case, in order, on every rank; ``timeout_s`` is for all of them together.

    ``function`` and the arguments must be importable and picklable.
    """
    deadline = time.monotonic() + timeout_s
    outcomes: dict[str, Outcome] = {}
    left = dict(cases)
    failures = 0
    while left and failures < _MOST_FAILURES:
        done, failure = _run_until_failure(function, left, ranks, deadline)
        for name, results in done.items():
            outcomes[name] = Outcome(results)
            del left[name]
        if failure is not None:
            failed = next(iter(left))
            outcomes[failed] = Outcome(failure=f"{failed}\n{failure}")
            del left[failed]
            failures += 1
    return outcomes | {name: Outcome(failure=f"not run: {failures} cases had failed before") for name in left}


@contextmanager
def one_rank() -> Iterator[None]:
    """Makes this very process the only rank of a gloo group, as DeepSpeed wants it, and undoes it."""
    import torch

    before = dict(os.environ)
    linear = torch.nn.functional.linear  # which ZeRO-3 replaces for good
    with tempfile.TemporaryDirectory() as folder:
        _become_rank(0, 1, Path(folder) / "store")
        try:
            yield
        finally:
            import deepspeed.comm as dist

            if dist.is_initialized():
                dist.destroy_process_group()
            torch.nn.functional.linear = linear
            os.environ.clear()
            os.environ.update(before)


def without_communication_op() -> None:
    """Keeps DeepSpeed from building its shared-memory collectives with a C++ compiler: gloo does the same work."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}


@cache
def _server() -> ForkServerContext:
    """Where ranks come from: a process of one thread and no group, with the imports that all of them need."""
    before = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        context = ForkServerContext()
        context.set_forkserver_preload(["ds_fgoffload", "deepspeed.pipe", "torch.distributed.checkpoint"])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run_until_failure(
    function: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]], ranks: int, deadline: float
) -> tuple[dict[str, tuple[Any, ...]], str | None]:
    """Results by rank of the cases up to the first that fails, and how that one failed."""
    context = _server()
    work = pickle.dumps((function, cases))
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(rank, ranks, Path(folder) / "store", work, theirs))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(pipes, list(cases), deadline)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(
    pipes: list[Connection], names: list[str], deadline: float
) -> tuple[dict[str, tuple[Any, ...]], str | None]:
    results: list[list[Any]] = [[] for _ in pipes]
    failures: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            waiting = ", ".join(f"rank {rank} in {names[len(results[rank])]!r}" for rank in open_pipes.values())
            if not failures:
                failures[-1] = f"no end in time: {waiting}"
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                passed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                if len(results[rank]) < len(names):
                    failures.setdefault(rank, f"rank {rank} died without a word")
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                del open_pipes[pipe]
                continue
            if passed:
                results[rank].append(value)
            else:
                failures[rank] = f"rank {rank} failed\n{value}"
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    complete = min(len(values) for values in results)
    done = {name: tuple(values[i] for values in results) for i, name in enumerate(names[:complete])}
    return done, "\n".join(failures[rank] for rank in sorted(failures)) if failures else None


def _rank(rank: int, ranks: int, store: Path, work: bytes, pipe: Connection) -> None:
    try:
        _become_rank(rank, ranks, store)
        function, cases = pickle.loads(work)
        for arguments in cases.values():
            gc.collect()
            gc.freeze()  # ZeRO-3 collects garbage at each start: no need to go through torch's objects for that
            pipe.send_bytes(pickle.dumps((True, function(*arguments))))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent shows it
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
    os._exit(0)  # no farewell to peers that may have been killed


def _become_rank(rank: int, ranks: int, store: Path) -> None:
    # LOCAL_SIZE is what DeepSpeed's CPU accelerator takes for the number of devices.
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}.items():
        os.environ[name] = str(value)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm as dist
    import torch

    torch.set_num_threads(1)
    without_communication_op()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    dist.init_distributed(dist_backend="gloo", verbose=False)
