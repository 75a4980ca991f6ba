"""Has the next round planned from the last ones, until the plan is as good as the recording allows, and when it is not.

The first rounds go by windows. The very first pins host memory and loads kernels, and says nothing of the others. A
plan is made from the one of middling length among the last few: equal rounds differ by some per cent, and now and then
one takes much longer.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace

from deepspeed.utils import logger

from ds_fgoffload.plan import Points
from ds_fgoffload.planner import Forecast, Wish, plan_round
from ds_fgoffload.recorder import Recorded, Recorder
from ds_fgoffload.simulation import Recording
from ds_fgoffload.stats import Planned
from ds_fgoffload.told import plan_told

LAST_ROUNDS = 3
"""Rounds among which the one of middling length is looked for."""
FITS = 0.05
"""Rounds fit a plan if their length differs by no more than this from the one recorded."""
BEARABLE_STALL = 0.002
"""Time that compute may wait unforeseen, as a fraction of the round."""
MORE_CAUTION = 1.03
MOST_CAUTION = 1.5
"""How much slower than measured copies are taken to be: a little, and more each time that compute had to wait."""
PLANS_AT_ONCE = 6
"""Plans that are made as soon as the last does not fit; after that, each must hold twice as many rounds."""
MEASURED_ROUNDS = 12
"""Rounds in which memory and reads are looked at even if the plan seems good."""
QUIET_ROUNDS = 8
"""Once a plan has proved right, the moments of one in so many rounds are marked: marks take the device some time."""
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
        self._recorder.measure(measure=wish is not None and not wish.everything)
        self._news: deque[Recorded] = deque()
        self._last: deque[Recorded] = deque(maxlen=LAST_ROUNDS)
        self._length_ms = 0.0
        self._guessed = False
        self._caution = MORE_CAUTION
        self._too_bold = False
        self._begun = 0
        self._rounds = 0
        self._settled = False
        self._plans = 0
        self._not_before = 0
        self._cache_emptied = False
        self.forecast: Forecast | None = None
        """What the present plan is expected to do; None: there is none yet."""

    def points(self) -> Points | None:
        """At the beginning of a round: what the next is to go by."""
        self.look()
        while self._news:
            self._consider(self._news.popleft())
        self._begun += 1
        self._recorder.takes_times = not self._settled or self._begun % QUIET_ROUNDS == 0
        return None if self.forecast is None else self.forecast.points

    def end(self) -> None:
        """No more rounds will be recorded."""
        self._recorder.end()

    def look(self) -> None:
        """Reads what the device has passed since."""
        while (recorded := self._recorder.read()) is not None:
            self._news.append(recorded)

    def _consider(self, recorded: Recorded) -> None:
        self._rounds += 1
        if self._wish is None or self._rounds == 1 or not recorded.recording.d2h_bytes_per_ms:
            return
        if self._last and not recorded.recording.is_like(self._last[-1].recording):
            self._last.clear()
        self._last.append(recorded)
        if self._rounds > MEASURED_ROUNDS:
            self._recorder.measure(measure=False)
        if len(self._last) < LAST_ROUNDS:
            return
        fits = self.forecast is not None and self._fits(self.forecast)
        self._settled = fits and self._rounds > MEASURED_ROUNDS
        if fits:
            self._empty_cache_once(recorded)
        elif self._rounds >= self._not_before:
            self._plan(self._wish)

    def _fits(self, forecast: Forecast) -> bool:
        """Whether the plan is right for the last rounds. What did not go by it tells nothing of its waits."""
        points = forecast.points
        if points.positions.keys() != {passed.moment for passed in self._last[-1].recording.passed}:
            return False
        if any(recorded.points is not points for recorded in self._last):
            return True
        recordings = [recorded.recording for recorded in self._last]
        if self._guessed and not any(recording.guessed for recording in recordings):
            return False
        length_ms = statistics.median(recording.length_ms for recording in recordings)
        if abs(length_ms - self._length_ms) > FITS * self._length_ms:
            return False
        stalled_ms = statistics.median(recording.stalled_ms for recording in recordings)
        self._too_bold = stalled_ms > forecast.stalled_ms + BEARABLE_STALL * length_ms
        return points.within_window or not self._too_bold  # what a window costs, no plan can help

    def _plan(self, wish: Wish) -> None:
        usable = [recorded for recorded in self._last if recorded.with_memory or wish.everything]
        if not usable:
            self._recorder.measure(measure=True)
            return
        if self._too_bold:
            self._caution = min(MOST_CAUTION, self._caution * MORE_CAUTION)
            self._too_bold = False
        usable.sort(key=lambda recorded: recorded.recording.length_ms)
        recorded = usable[len(usable) // 2]
        if not wish.everything:
            room_bytes = int(ROOM * self._recorder.total_bytes()) - recorded.peak_between_bytes
            wish = replace(wish, room_bytes=room_bytes)
        self.forecast = plan_round(recorded.recording, wish, caution=self._caution)
        planned = self._recorder.rounds.planned = _planned(self.forecast, recorded.recording)
        self._guessed = recorded.recording.guessed
        self._length_ms = max(recorded.recording.length_ms, 1e-3)
        self._last.clear()
        self._settled = False
        self._plans += 1
        self._not_before = self._rounds + (
            2 ** min(self._plans - PLANS_AT_ONCE, 10) if self._plans > PLANS_AT_ONCE else 0
        )
        logger.debug(f"fine_grained_offload: after {self._rounds} rounds {plan_told(planned)}")

    def _empty_cache_once(self, recorded: Recorded) -> None:
        """Of what rounds before the plan have left in the allocator's cache, in sizes of their own."""
        if not self._cache_emptied and self.forecast is not None and recorded.points is self.forecast.points:
            self._cache_emptied = True
            self._recorder.empty_cache()


def _planned(forecast: Forecast, recording: Recording) -> Planned:
    without_bytes = recording.peak_bytes or None
    return Planned(
        forecast.copied_bytes,
        saved_bytes=sum(passed.size_bytes for passed in recording.passed),
        stalled_ms=forecast.stalled_ms,
        length_ms=recording.length_ms,
        peak_bytes=None if without_bytes is None else forecast.peak_bytes,
        peak_without_bytes=without_bytes,
    )
