"""Has the next round planned from the last ones, until the plan is as good as the profiles allow, and when it is not.

The first rounds go by windows. The very first pins host memory and loads kernels, and says nothing of the others. A
plan is made for the shortest round that those that are known let expect (:mod:`~ds_fgoffload.planning.typical_round`),
or for a usual one if time may be added, and holds until compute waits for more than it foresees, or rounds take longer.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from deepspeed.utils import logger

from ds_fgoffload.planning.planner import Forecast, PlanGoal, plan_round
from ds_fgoffload.planning.typical_round import combine_rounds
from ds_fgoffload.profiling.profile import RoundProfile
from ds_fgoffload.profiling.recorder import Recorded, Recorder
from ds_fgoffload.schedule.plan import Place, Points
from ds_fgoffload.stats import Planned
from ds_fgoffload.text.sentences import plan_sentence

LAST_ROUNDS = 3
"""Rounds by which a plan is judged."""
KNOWN_ROUNDS = 12
"""Most rounds for which it is made."""
DISTORTED = 0.1
"""A round in which compute waited for a larger part of the time says little of how long its stretches are: meanwhile
other things went on for which it would have waited otherwise, such as what the next stage of a pipeline does."""
FITS = 0.05
"""Rounds take as long as those for which a plan was made, but for this part."""
BEARABLE_STALL = 0.002
"""Time that compute may wait unforeseen, as a fraction of the round."""
FIRST_CAUTION = 1.01
MORE_CAUTION = 1.03
MOST_CAUTION = 1.5
"""How much slower than measured copies are taken to be: a little, and more each time that compute had to wait."""
PLANS_AT_ONCE = 6
"""Plans that are made as soon as the last does not fit; after that, each must hold twice as many rounds."""
MEASURED_ROUNDS = 12
"""Rounds in which memory and reads are looked at even if the plan seems good."""
QUIET_ROUNDS = 8
"""Once a plan has proved right, or none does, or nothing is copied, the moments of one in so many rounds are marked:
marks take time."""
WORTH_IT = 0.03
"""A plan that has proved right gives way to one that lowers the peak by so much more of what is saved."""
NEVER = sys.maxsize
UNREAD_ROUNDS = 2
"""Rounds that are over and that nobody has looked at, because none of them came to a backward."""
ROOM = 0.92
"""Of the device's memory; the rest goes to what the allocator cannot use."""


class Tuner:
    """One per attachment.

    Args:
        goal: what the user allows and asks for; None: nothing is planned, because the user has set windows.
        recorder: tells of the rounds.
    """

    def __init__(self, goal: PlanGoal | None, recorder: Recorder) -> None:
        self._goal = goal
        self._recorder = recorder
        self._recorder.measure(measure=goal is not None and not goal.everything)
        self._known: deque[Recorded] = deque(maxlen=KNOWN_ROUNDS)
        self._last: deque[Recorded] = deque(maxlen=LAST_ROUNDS)
        self._with_memory: Recorded | None = None
        self._proved_rounds = 0
        self._held: set[Place] = set()
        self._took_ms = 0.0
        self._guessed = False
        self._caution = FIRST_CAUTION
        self._too_bold = False
        self._begun = 0
        self._rounds = 0
        self._settled = False
        self._plans = 0
        self._not_before = 0
        self._look_again_at = NEVER
        self._emptied_for: Points | None = None
        self._cache_is_to_be_emptied = False
        self.forecast: Forecast | None = None
        """What the present plan is expected to do; None: there is none yet."""

    def points(self) -> Points | None:
        """At the beginning of a round: what the next is to go by.

        Nothing is read or planned here unless much is unread: the device often has nothing to do at the beginning of a
        step, and would wait for the host.
        """
        if self._recorder.unread_rounds > UNREAD_ROUNDS:
            self.look()
        if self._cache_is_to_be_emptied:
            self._cache_is_to_be_emptied = False
            self._recorder.empty_cache()
        self._begun += 1
        copies_nothing = self._rounds > MEASURED_ROUNDS and not self._known
        is_quiet = self._settled or copies_nothing or self._plans > PLANS_AT_ONCE
        self._recorder.takes_times = not is_quiet or self._begun % QUIET_ROUNDS == 0
        return None if self.forecast is None else self.forecast.points

    def end(self) -> None:
        """No more rounds will be recorded."""
        self._recorder.end()

    def look(self) -> None:
        """Reads what the device has passed since, and plans; best while the device has enough to do."""
        while (recorded := self._recorder.read()) is not None:
            self._consider(recorded)

    def _consider(self, recorded: Recorded) -> None:
        self._rounds += 1
        if self._rounds > MEASURED_ROUNDS:
            self._recorder.measure(measure=False)
        if self._goal is None or self._rounds == 1 or not recorded.profile.d2h_bytes_per_ms:
            return
        if self._known and not recorded.profile.is_like(self._known[-1].profile):
            self._known.clear()
            self._last.clear()
            self._held.clear()
            self._with_memory = None
            self._settled = False
        self._held |= recorded.profile.held
        self._known.append(recorded)
        self._last.append(recorded)
        if recorded.with_memory:
            self._with_memory = recorded
        if len(self._last) < LAST_ROUNDS:
            return
        fits = self.forecast is not None and self._fits(self.forecast)
        self._settled = fits and self._rounds > MEASURED_ROUNDS and self._look_again_at == NEVER
        if fits:
            self._empty_cache_once(recorded)
            self._improve(self._goal)
        elif self._rounds >= self._not_before:
            self._plan(self._goal)

    def _fits(self, forecast: Forecast) -> bool:
        """Whether the plan is right for the last rounds. What did not go by it tells nothing of its waits."""
        points = forecast.points
        if points.positions.keys() != {passed.moment for passed in self._last[-1].profile.passed}:
            return False
        if any(recorded.points is not points for recorded in self._last):
            return True
        profiles = [recorded.profile for recorded in self._last]
        if self._guessed and not any(profile.guessed for profile in profiles):
            self._known = deque(self._last, KNOWN_ROUNDS)
            return False
        # All of them: one alone may be long for want of memory in the cache, or when Python collects its garbage.
        are_slower = min(map(_length_ms, self._last)) > (1 + FITS) * self._took_ms
        if are_slower and self._rounds >= self._look_again_at:
            return False
        if not are_slower:
            self._look_again_at = NEVER
        elif self._look_again_at == NEVER:
            self._look_again_at = self._rounds + KNOWN_ROUNDS  # then those that were faster are forgotten
        took_ms = _took_ms(self._last)
        stalled_ms = statistics.median(profile.stalled_ms for profile in profiles)
        waits = stalled_ms > self._foreseen_ms(forecast, took_ms) + BEARABLE_STALL * self._took_ms
        if waits and took_ms < (1 - FITS) * self._took_ms:  # what was usual is not any more
            self._known = deque((one for one in self._known if _length_ms(one) <= (1 + FITS) * took_ms), KNOWN_ROUNDS)
        as_long = abs(took_ms - self._took_ms) <= FITS * self._took_ms
        self._too_bold = waits and as_long and not any(profile.guessed for profile in profiles)
        return not waits or (points.within_window and as_long)  # what a window costs, no plan can help

    def _foreseen_ms(self, forecast: Forecast, took_ms: float) -> float:
        """Time that compute may wait in rounds that take ``took_ms``: what the plan foresees, in shorter ones less."""
        if self._goal is None or not self._goal.max_overhead:
            return forecast.stalled_ms
        return forecast.stalled_ms * min(1.0, took_ms / self._took_ms)

    def _plan(self, goal: PlanGoal) -> None:
        """Makes a plan, because the last is not right for the rounds that are known."""
        if self._with_memory is None and not goal.everything:
            self._recorder.measure(measure=True)
            return
        if self._too_bold:
            self._caution = min(MOST_CAUTION, self._caution * MORE_CAUTION)
            self._too_bold = False
        self._go_by(*self._made(goal))
        if self._rounds >= self._look_again_at:
            self._look_again_at = NEVER
        self._plans += 1
        self._not_before = self._rounds + (
            2 ** min(self._plans - PLANS_AT_ONCE, 10) if self._plans > PLANS_AT_ONCE else 0
        )

    def _improve(self, goal: PlanGoal) -> None:
        """The plan has proved right; now and then a bolder one is made, should the link have been disturbed before."""
        self._proved_rounds += 1
        if not self._settled or self._with_memory is None or self._proved_rounds % KNOWN_ROUNDS:
            return
        forecast, profile = self._made(goal)
        now, then = self._recorder.rounds.planned, _planned(forecast, profile)
        assert now is not None
        if (then.freed_bytes or 0) > (now.freed_bytes or 0) + WORTH_IT * then.saved_bytes:
            self._go_by(forecast, profile)

    def _made(self, goal: PlanGoal) -> tuple[Forecast, RoundProfile]:
        """A plan for the rounds that are known, and what it was made from."""
        base = self._known[-1] if self._with_memory is None else self._with_memory
        rates_of = [known.profile for known in self._known]
        usual = bool(goal.max_overhead)
        profile = combine_rounds(base.profile, self._undistorted(), rates_of, usual=usual)
        # What is held is seen only in rounds in which it is to leave.
        profile = replace(profile, held=frozenset(self._held))
        if not goal.everything:
            room_bytes = int(ROOM * self._recorder.total_bytes()) - base.peak_between_bytes
            goal = replace(goal, room_bytes=room_bytes)
        return plan_round(profile, goal, caution=self._caution), profile

    def _go_by(self, forecast: Forecast, profile: RoundProfile) -> None:
        self.forecast = forecast
        planned = self._recorder.rounds.planned = _planned(forecast, profile)
        self._guessed = profile.guessed
        self._took_ms = _took_ms(self._last)
        self._last.clear()
        self._settled = False
        self._proved_rounds = 0
        logger.debug(f"fine_grained_offload: after {self._rounds} rounds {plan_sentence(planned)}")

    def _undistorted(self) -> list[RoundProfile]:
        """Those of the known rounds in which compute waited little; if they are few, those in which it waited least."""
        profiles = [recorded.profile for recorded in self._known]
        by_distortion = sorted(profiles, key=lambda profile: profile.stalled_ms / max(profile.length_ms, 1e-3))
        count = sum(profile.stalled_ms <= DISTORTED * profile.length_ms for profile in profiles)
        return by_distortion[: max(count, LAST_ROUNDS)]

    def _empty_cache_once(self, recorded: Recorded) -> None:
        """Of what rounds before the plan have left in the allocator's cache, in sizes of their own."""
        if self.forecast is not None and self.forecast.points is recorded.points is not self._emptied_for:
            self._emptied_for = recorded.points
            self._cache_is_to_be_emptied = True


def _length_ms(recorded: Recorded) -> float:
    """Of the round, with what compute waited."""
    return recorded.profile.length_ms + recorded.profile.stalled_ms


def _took_ms(rounds: Iterable[Recorded]) -> float:
    """Of the rounds, the middling one's time."""
    return max(1e-3, statistics.median(map(_length_ms, rounds)))


def _planned(forecast: Forecast, profile: RoundProfile) -> Planned:
    without_bytes = profile.peak_bytes or None
    return Planned(
        forecast.copied_bytes,
        saved_bytes=sum(passed.size_bytes for passed in profile.passed),
        stalled_ms=forecast.stalled_ms,
        length_ms=profile.length_ms,
        peak_bytes=None if without_bytes is None else forecast.peak_bytes,
        peak_without_bytes=without_bytes,
    )
