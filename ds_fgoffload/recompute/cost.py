"""What recomputation costs: device times of the calls that ran again, set against the time of the steps they lie in."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import TypeAlias

from ds_fgoffload.device.streams import Fence, Streams
from ds_fgoffload.stats import UnitStats, shown
from ds_fgoffload.text.messages import warn

COSTLY_SHARE = 0.05
"""A warning is given if recomputation takes more of the time than this."""
WARM_UP_MICRO_BATCHES = 3
COUNTED_MICRO_BATCHES = 8
"""The share is taken over so many micro-batches at a time."""

_MICRO_BATCH = None

TimeMark: TypeAlias = Fence | float
"""On a device, or of the clock where work is synchronous."""


class RecomputeCost:
    """One per attachment. Reads the device's clock when the device has passed; waits for nothing."""

    def __init__(self, units: Mapping[str, UnitStats], streams: Streams) -> None:
        self._units = units
        self._streams = streams
        self._pending: deque[tuple[str | None, TimeMark, TimeMark]] = deque()
        self._last_micro_batch: TimeMark | None = None
        self._micro_batches = 0
        self._period_ms = 0.0
        self._spent_ms: defaultdict[str, float] = defaultdict(float)
        self._told = False

    def now(self) -> TimeMark:
        """The present moment of the compute stream."""
        fence = self._streams.fence(self._streams.compute())
        return time.perf_counter() if fence is None else fence

    def end(self, unit: str, began: TimeMark) -> None:
        """A call of ``unit`` has run again since ``began``."""
        self._pending.append((unit, began, self.now()))

    def micro_batch_began(self) -> None:
        now = self.now()
        if self._last_micro_batch is not None:
            self._pending.append((_MICRO_BATCH, self._last_micro_batch, now))
        self._last_micro_batch = now
        self.read()

    def read(self) -> None:
        """Counts what the device has come to."""
        while self._pending:
            unit, began, ended = self._pending[0]
            time_ms = self._elapsed_ms(began, ended)
            if time_ms is None:
                return
            self._pending.popleft()
            if unit is not _MICRO_BATCH:
                self._units[unit].recompute_ms += time_ms
                self._spent_ms[unit] += time_ms
            else:
                self._count_micro_batch(time_ms)

    def _elapsed_ms(self, began: TimeMark, ended: TimeMark) -> float | None:
        """None if the device has not come to the end yet."""
        if isinstance(began, Fence) and isinstance(ended, Fence):
            return self._streams.elapsed_ms(began, ended) if self._streams.reached(ended) else None
        assert isinstance(began, float)
        assert isinstance(ended, float)
        return (ended - began) * 1e3

    def _count_micro_batch(self, time_ms: float) -> None:
        self._micro_batches += 1
        self._period_ms += time_ms
        counted = self._micro_batches - WARM_UP_MICRO_BATCHES
        if counted % COUNTED_MICRO_BATCHES == 0:
            if counted > 0:
                self._tell()
            self._period_ms = 0.0
            self._spent_ms.clear()

    def _tell(self) -> None:
        spent_ms = sum(self._spent_ms.values())
        if self._told or spent_ms <= COSTLY_SHARE * self._period_ms:
            return
        self._told = True
        costly = sorted(self._spent_ms.items(), key=lambda spent: -spent[1])[:3]
        most = ", ".join(f"{shown(unit)} {ms / self._period_ms:.1%}" for unit, ms in costly)
        warn(
            f"fine_grained_offload.recompute: recomputing takes {spent_ms / self._period_ms:.1%} of the step, more "
            f"than {COSTLY_SHARE:.0%} (most: {most}); recompute what is cheap, such as norms and activation functions, "
            'and list costly modules under "modules" instead, to offload them'
        )
