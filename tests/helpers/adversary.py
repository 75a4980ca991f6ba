"""Streams that do their worst: every order that the recorded waits allow, and memory that is spoilt once it is freed.

Compute runs at once, as the program goes. A copy waits in its stream's queue until something that was told to wait for
it relies on it, or until the dice say so: legal, and as late as can be. What goes wrong shows in two ways.

A number is wrong, because 0xFF bytes (NaN in every floating type) are

* what a copy delivers that reads memory which was freed, or which compute had not been made to write first;
* what new device memory holds until a copy into it has run.

An access out of order is in ``faults``, whatever order the dice drew, because vector clocks tell:

* a copy that reads device memory which was freed before;
* a copy into device memory that a compute stream may still be using;
* device memory that goes back to its stream's pool while a copy into it is not over for that stream;
* device memory that was read on one stream and is freed before the others of its track waited for that;
* two accesses to the same host bytes, one of them a write, in no order.

Compute streams are named "track.name". Those of one track on which anything was saved or used hand memory to each
other: what one lets go of, another may fill. Tracks know nothing of each other.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_fgoffload.device.streams import Fence

SPOILT = 0xFF
CACHE_LINE = 64  # where torch.empty() begins; kernels may round otherwise elsewhere
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
    before: Clock  # copies of the other stream that come first


class _Read(NamedTuple):
    memory: StorageWeakRef
    stream: str
    number: int


class _DeviceMemory(bytearray):
    """Knows which stream's pool it is from and who is copying into it, and tells when it is freed."""

    streams: AdversarialStreams
    owner: str
    copy_number = 0

    def __del__(self) -> None:
        if self.copy_number > self.streams.clock(self.owner)["h2d"]:
            self.streams.faults.append(f"the memory of h2d copy {self.copy_number} is freed before {self.owner} waited")


class _Event:
    """What a stream had queued, and known of the others, when a fence was put there."""

    def __init__(self, clock: Clock, streams: AdversarialStreams) -> None:
        self.clock = clock
        self._streams = streams

    def synchronize(self) -> None:
        self._streams.run_copies_before(self.clock)

    def at_ms(self) -> float:
        return float(self.clock.total())


class AdversarialStreams:
    """One device of ill will. ``seed`` decides every choice, so that a fault can be seen again."""

    synchronous = False
    d2h = "d2h"
    h2d = "h2d"

    def __init__(self, seed: int) -> None:
        self.device = torch.device("cpu")
        self.faults: list[str] = []
        self.out_of_memory_at: int | None = None
        """The allocation that fails, counted from 1."""
        self._random = random.Random(seed)
        self._seen: Callable[[], None] | None = None
        self._eagerness = self._random.choice([0.0, 0.0, 0.1, 0.5])
        self.current = self.writer = "main.compute"
        self._computes: set[str] = set()
        self._clocks: dict[str, Clock] = {}
        self._queues: dict[str, deque[_Copy]] = {self.d2h: deque(), self.h2d: deque()}
        self._run: Clock = Counter()  # copies run, per stream
        self._host_accesses: list[_Access] = []
        self._memories: weakref.WeakValueDictionary[int, _DeviceMemory] = weakref.WeakValueDictionary()
        self._reads: list[_Read] = []
        self._allocations = 0

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Compute is queued on another stream meanwhile; as on a device, it is ordered by nothing but waits."""
        before = self.switch(stream)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, stream: str) -> str:
        before, self.current = self.current, stream
        return before

    def join(self, stream: str, other: str) -> None:
        """``stream`` waits for ``other``, as a user does who hands tensors from one to the other."""
        self._tick(other)
        self.wait(stream, self.fence(other))

    def read(self, stream: str, tensors: list[torch.Tensor]) -> None:
        """The last kernel of ``stream`` reads ``tensors``, and nothing keeps them afterwards."""
        number = self.clock(stream)[stream]
        self._reads += [_Read(StorageWeakRef(tensor.untyped_storage()), stream, number) for tensor in tensors]

    def drain(self) -> None:
        """Runs what is queued: the end of the program."""
        self._roll()
        for stream, queue in self._queues.items():
            while queue:
                self._run_first(stream)

    def clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, Counter())

    def compute(self) -> str:
        self._computes.add(self.current)
        self._tick(self.current)  # whoever asks has queued work there
        return self.current

    def fence(self, stream: str) -> Fence:
        self._roll()
        return Fence(stream, self.clock(stream)[stream], _Event(self.clock(stream).copy(), self))

    def wait(self, stream: str, fence: Fence | None) -> None:
        assert fence is not None
        self.clock(stream).update(fence.event.clock - self.clock(stream))
        if stream not in self._queues:
            # What was copied in may be read now. What was copied out may be overwritten once all have waited.
            all_know = min(self.clock(mate)[self.d2h] for mate in self._track(stream))
            self.run_copies_before(Counter({self.h2d: self.clock(stream)[self.h2d], self.d2h: all_know}))
        self._roll()

    def synchronize(self, fence: Fence | None) -> None:
        assert fence is not None
        fence.event.synchronize()

    def reached(self, fence: Fence) -> bool:
        return self._random.random() < 0.9

    def elapsed_ms(self, begin: Fence, end: Fence) -> float:
        """Anything: what is planned by these times is advice."""
        return end.event.at_ms() - begin.event.at_ms() + self._random.random()

    def watch_reads(self, seen: Callable[[], None] | None) -> None:
        self._seen = seen

    def allocated_bytes(self) -> int:
        if self._seen is not None and self._random.random() < 0.5:
            self._seen()
        return self._random.randrange(1 << 14)

    def peak_allocated_bytes(self) -> int:
        return 1 << 14

    def total_bytes(self) -> int:
        return self._random.randrange(1 << 15)

    def empty_cache(self) -> None:
        pass

    def run_copies_before(self, clock: Clock) -> None:
        """Runs every copy that someone with that clock may rely on."""
        for stream in self._queues:
            self._run_until(stream, clock[stream])

    def copy(self, stream: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        number = self._tick(stream)
        before = Counter({other: self.clock(stream)[other] for other in self._queues if other != stream})
        if stream == self.d2h:
            unwritten = not self._has_seen(stream, self.writer)
            self._access(destination, writes=True, stream=stream, number=number)
            copy = _Copy(number, destination, StorageWeakRef(source.untyped_storage()), unwritten, before)
        else:
            memory = self._memories[destination.data_ptr()]
            memory.copy_number = number
            self.faults += [
                f"h2d copy {number} may write memory that {compute} still uses"
                for compute in self._track(memory.owner)
                if not self._has_seen(stream, compute)
            ]
            self._access(source, writes=False, stream=stream, number=number)
            copy = _Copy(number, StorageWeakRef(destination.untyped_storage()), source, spoilt=False, before=before)
        self._queues[stream].append(copy)
        self._roll()

    def allocate(self, stream: str, size_bytes: int) -> torch.Tensor:
        self._allocations += 1
        if self._allocations == self.out_of_memory_at:
            raise torch.OutOfMemoryError("adversary: out of memory")
        self._tick(stream)
        memory = _DeviceMemory(bytes([SPOILT]) * (size_bytes + CACHE_LINE))
        memory.streams, memory.owner = self, stream
        begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % CACHE_LINE
        tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=size_bytes)
        self._memories[tensor.data_ptr()] = memory
        return tensor

    def _track(self, compute: str) -> list[str]:
        track = compute.partition(".")[0] + "."
        return [compute, *(stream for stream in self._computes if stream.startswith(track) and stream != compute)]

    def _has_seen(self, stream: str, other: str) -> bool:
        return self.clock(stream)[other] >= self.clock(other)[other]

    def _tick(self, stream: str) -> int:
        self.clock(stream)[stream] += 1
        return self.clock(stream)[stream]

    def _roll(self) -> None:
        """Perhaps runs a copy that may run now; looks what was freed."""
        for read in [read for read in self._reads if read.memory.expired()]:
            self._reads.remove(read)
            self.faults += [
                f"memory that {read.stream} reads is freed before {mate} waited"
                for mate in self._track(read.stream)
                if self.clock(mate)[read.stream] < read.number
            ]
        while self._random.random() < self._eagerness:
            ready = [
                stream
                for stream, queue in self._queues.items()
                if queue and all(self._run[other] >= number for other, number in queue[0].before.items())
            ]
            if not ready:
                return
            self._run_first(self._random.choice(ready))

    def _run_until(self, stream: str, number: int) -> None:
        while self._queues[stream] and self._queues[stream][0].number <= number:
            self._run_first(stream)

    def _run_first(self, stream: str) -> None:
        for other, number in self._queues[stream][0].before.items():
            self._run_until(other, number)
        copy = self._queues[stream].popleft()
        self._run[stream] = copy.number
        source, destination = _alive(copy.source), _alive(copy.destination)
        if destination is None:
            return  # its end told what there is to tell
        if source is None:
            self.faults.append(f"{stream} copy {copy.number} reads memory that was freed, whose pages may be unmapped")
        if source is None or copy.spoilt:
            destination.fill_(SPOILT)
        else:
            destination.copy_(source)

    def _access(self, block: torch.Tensor, *, writes: bool, stream: str, number: int) -> None:
        begin, end = block.data_ptr(), block.data_ptr() + block.numel()
        clock = self.clock(stream)
        kept = []
        for earlier in self._host_accesses:
            overlaps = earlier.begin < end and begin < earlier.end
            ordered = clock[earlier.stream] >= earlier.number
            if overlaps and not ordered and (writes or earlier.writes):
                both = f"{stream} copy {number} and {earlier.stream} copy {earlier.number}"
                self.faults.append(f"{both} touch the same host bytes in no order")
            if not (ordered and writes and begin <= earlier.begin and earlier.end <= end):
                kept.append(earlier)
        self._host_accesses = [*kept, _Access(begin, end, writes, stream, number)]


def _alive(memory: torch.Tensor | StorageWeakRef) -> torch.Tensor | None:
    if isinstance(memory, torch.Tensor):
        return memory
    storage: Any = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
    return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage)
