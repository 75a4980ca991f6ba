"""Has the next round planned from the last ones, until the plan is as good as the recording allows, and when it is not.

The first round goes by windows. It pins host memory and compiles kernels, so that the rounds after it are shorter:
a plan holds only for rounds that go as the recorded one did.
"""

from __future__ import annotations

from dataclasses import replace

from deepspeed.utils import logger

from ds_fgoffload.plan import Points
from ds_fgoffload.planner import Forecast, Wish, plan_round
from ds_fgoffload.recorder import Recorded, Recorder

EARLY_ROUNDS = 10
"""Rounds in which a plan is made anew as soon as it does not fit."""
FITS = 0.03
"""A round fits a plan if its length differs by no more than this from the one recorded."""
BEARABLE_STALL = 0.002
"""Time that compute may wait unforeseen, as a fraction of the round."""
MOST_CAUTION = 2.0
ROOM = 0.92
"""Of the device's memory; the rest goes to what the allocator cannot use."""


class Tuner:
    """One per attachment.

    Args:
        wish: what the user allows and asks for; None: nothing is planned, because the user has set windows.
        recorder: tells of the rounds.
    """

    def __init__(self, wish: Wish | None, recorder: Recorder) -> None:
        self._wish = wish
        self._recorder = recorder
        self._recorder.measure_memory = wish is not None and not wish.everything
        self._last: Recorded | None = None
        self._length_ms = 0.0
        self._caution = 1.0
        self._rounds = 0
        self._plans = 0
        self._not_before = 0
        self._cache_emptied = False
        self.forecast: Forecast | None = None
        """What the present plan is expected to do; None: there is none yet."""

    def points(self) -> Points | None:
        """At the beginning of a round: what the next is to go by."""
        self.look()
        recorded, self._last = self._last, None
        if recorded is not None and self._wish is not None:
            self._rounds += 1
            if self._fits(recorded):
                self._settle(recorded)
            elif self._rounds >= self._not_before and recorded.recording.d2h_bytes_per_ms:
                if self._wish.everything or recorded.with_memory:
                    self._plan(recorded, self._wish)
                else:
                    self._recorder.measure_memory = True
        return None if self.forecast is None else self.forecast.points

    def look(self) -> None:
        """Reads what the device has passed since."""
        while (recorded := self._recorder.read()) is not None:
            self._last = recorded

    def _fits(self, recorded: Recorded) -> bool:
        """Whether the plan is right for that round. One that did not go by the plan tells nothing of it."""
        if self.forecast is None:
            return False
        points, recording = self.forecast.points, recorded.recording
        if points.positions.keys() != {passed.moment for passed in recording.passed}:
            return False
        if recorded.points is not points:
            return True
        bearable_ms = self.forecast.stalled_ms + BEARABLE_STALL * recording.length_ms
        if recording.stalled_ms > bearable_ms and not points.within_window:  # what a window costs, no plan can help
            self._caution = min(MOST_CAUTION, self._caution * 1.2)
            return False
        change = abs(recording.length_ms - self._length_ms) / self._length_ms
        return change <= FITS * (1 if self._rounds < EARLY_ROUNDS else 3)

    def _plan(self, recorded: Recorded, wish: Wish) -> None:
        if not wish.everything:
            room_bytes = int(ROOM * self._recorder.total_bytes()) - recorded.peak_between_bytes
            wish = replace(wish, room_bytes=room_bytes)
        self.forecast = plan_round(recorded.recording, wish, caution=self._caution)
        self._length_ms = max(recorded.recording.length_ms, 1e-3)
        self._plans += 1
        if self._rounds > EARLY_ROUNDS:
            self._not_before = self._rounds + 2 ** min(self._plans, 10)
        logger.debug(f"fine_grained_offload: planned from round {self._rounds}: {self._told()}")

    def _settle(self, recorded: Recorded) -> None:
        if self._rounds > EARLY_ROUNDS:
            self._recorder.measure_memory = False
        if not self._cache_emptied and self.forecast is not None and recorded.points is self.forecast.points:
            # What rounds before the plan have left in the allocator's cache, in sizes of their own.
            self._cache_emptied = True
            self._recorder.empty_cache()

    def _told(self) -> str:
        assert self.forecast is not None
        copied = self.forecast.copied_bytes / 2**30
        return f"{copied:.2f} GiB copied in {self._length_ms:.1f} ms, {self.forecast.stalled_ms:.1f} ms waited"
