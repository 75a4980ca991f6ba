"""Streams that do their worst: every order that the recorded waits allow, and memory that is spoilt once it is freed.

Compute runs at once, as the program goes. A copy waits in its stream's queue until something that was told to wait for it
needs it, or until the dice say so: legal, and as late as can be. Three kinds of fault become visible:

* a copy that reads device memory that was freed, or that compute had not been made to write first, delivers 0xFF bytes
  (NaN in every floating type), and so does new device memory until its copy has run;
* a copy that writes device memory that was freed, or that compute may still be using, is listed in ``faults``;
* two accesses to the same host bytes, one of them a write, that no wait puts in order are listed in ``faults``
  (vector clocks tell, whatever order was drawn).
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_fgoffload.streams import Fence

SPOILT = 0xFF
Clock = Counter[str]


class _Access(NamedTuple):
    begin: int
    end: int
    writes: bool
    stream: str
    number: int


class _Copy(NamedTuple):
    number: int
    destination: torch.Tensor | StorageWeakRef
    source: torch.Tensor | StorageWeakRef
    spoilt: bool
    before: tuple[tuple[str, int], ...]  # copies of other streams that come first


class _Event:
    """What a stream had queued, and known of the others, when a fence was put there."""

    def __init__(self, clock: Clock, streams: AdversarialStreams) -> None:
        self.clock = clock
        self._streams = streams

    def synchronize(self) -> None:
        self._streams.run_copies_before(self.clock)


class AdversarialStreams:
    """One device of ill will. ``seed`` decides every choice, so that a fault can be seen again."""

    synchronous = False
    d2h = "d2h"
    h2d = "h2d"

    def __init__(self, seed: int) -> None:
        self.device = torch.device("cpu")
        self.faults: list[str] = []
        self._random = random.Random(seed)
        self._eagerness = self._random.choice([0.0, 0.0, 0.1, 0.5])
        self._current = "compute"
        self._clocks: dict[str, Clock] = {}
        self._queues: dict[str, deque[_Copy]] = {self.d2h: deque(), self.h2d: deque()}
        self._run: Counter[str] = Counter()  # copies run, per stream
        self._pending_waits: dict[str, Clock] = {self.d2h: Counter(), self.h2d: Counter()}
        self._host_accesses: list[_Access] = []
        self._allocated_at: dict[int, tuple[str, int]] = {}

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Compute is queued on another stream meanwhile; as on a device, it is ordered by nothing but waits."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def join(self, stream: str, other: str) -> None:
        """``stream`` waits for ``other``, as a user does who hands tensors from one to the other."""
        self.wait(stream, self.fence(other))

    def drain(self) -> None:
        """Runs what is queued: the end of the program."""
        for stream in self._queues:
            while self._queues[stream]:
                self._run_first(stream)

    def compute(self) -> str:
        self._tick(self._current)  # whoever asks has queued work there before
        return self._current

    def fence(self, stream: str) -> Fence:
        self._roll()
        return Fence(stream, self._clock(stream)[stream], _Event(self._clock(stream).copy(), self))

    def wait(self, stream: str, fence: Fence | None) -> None:
        assert fence is not None
        known = fence.event.clock
        self._clocks[stream] = self._clock(stream) | known
        if stream in self._queues:
            self._pending_waits[stream] |= Counter({s: known[s] for s in self._queues})
        else:
            self.run_copies_before(known)
        self._roll()

    def synchronize(self, fence: Fence | None) -> None:
        assert fence is not None
        fence.event.synchronize()

    def run_copies_before(self, clock: Clock) -> None:
        """Runs every copy that someone with that clock may rely on."""
        for stream in self._queues:
            self._run_until(stream, clock[stream])

    def copy(self, stream: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        number = self._tick(stream)
        waits = self._pending_waits[stream]
        before = tuple((s, n) for s, n in waits.items() if s != stream)
        if stream == self.d2h:
            spoilt = self._clock(stream)[self._current] < self._clock(self._current)[self._current]
            self._access(destination, writes=True, stream=stream, number=number)
            copy = _Copy(number, destination, StorageWeakRef(source.untyped_storage()), spoilt, before)
        else:
            compute, allocated = self._allocated_at.pop(destination.data_ptr())
            if self._clock(stream)[compute] < allocated:
                self.faults.append(f"h2d copy {number} may write memory that {compute} still uses")
            self._access(source, writes=False, stream=stream, number=number)
            copy = _Copy(number, StorageWeakRef(destination.untyped_storage()), source, spoilt=False, before=before)
        self._queues[stream].append(copy)
        self._roll()

    def allocate(self, stream: str, size_bytes: int) -> torch.Tensor:
        memory = torch.full((size_bytes,), SPOILT, dtype=torch.uint8)
        self._allocated_at[memory.data_ptr()] = (stream, self._tick(stream))
        return memory

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, Counter())

    def _tick(self, stream: str) -> int:
        clock = self._clock(stream)
        clock[stream] += 1
        return clock[stream]

    def _roll(self) -> None:
        """Perhaps runs a copy that may run now."""
        while self._random.random() < self._eagerness:
            ready = [
                stream
                for stream, queue in self._queues.items()
                if queue and all(self._run[s] >= n for s, n in queue[0].before)
            ]
            if not ready:
                return
            self._run_first(self._random.choice(ready))

    def _run_until(self, stream: str, number: int) -> None:
        while self._queues[stream] and self._queues[stream][0].number <= number:
            self._run_first(stream)

    def _run_first(self, stream: str) -> None:
        for other, number in self._queues[stream][0].before:
            self._run_until(other, number)
        copy = self._queues[stream].popleft()
        self._run[stream] = copy.number
        source = _whole(copy.source)
        destination = _whole(copy.destination)
        if destination is None:
            self.faults.append(f"{stream} copy {copy.number} writes device memory that was freed")
        elif source is None or copy.spoilt:
            destination.fill_(SPOILT)
        else:
            destination.copy_(source)

    def _access(self, block: torch.Tensor, *, writes: bool, stream: str, number: int) -> None:
        begin, end = block.data_ptr(), block.data_ptr() + block.numel()
        clock = self._clock(stream)
        kept = []
        for earlier in self._host_accesses:
            overlaps = earlier.begin < end and begin < earlier.end
            ordered = clock[earlier.stream] >= earlier.number
            if overlaps and not ordered and (writes or earlier.writes):
                self.faults.append(
                    f"{stream} copy {number} and {earlier.stream} copy {earlier.number} touch the same host bytes in no order"
                )
            if not (ordered and writes and begin <= earlier.begin and earlier.end <= end):
                kept.append(earlier)
        self._host_accesses = [*kept, _Access(begin, end, writes, stream, number)]


def _whole(memory: torch.Tensor | StorageWeakRef) -> torch.Tensor | None:
    if isinstance(memory, torch.Tensor):
        return memory
    storage: Any = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
    return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage)
