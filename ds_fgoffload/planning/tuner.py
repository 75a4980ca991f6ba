"""Decides when a new plan is made from the last measured rounds, one plan for each class of size.

Rounds of about one size form a class, which has a plan of its own; the plan that a round goes by is looked up when the
size of its first micro-batch is known. Plans are made for what a model of the step
(:mod:`~ds_fgoffload.planning.step_model`) lets expect at the class's size, and tried on all known rounds
(:mod:`~ds_fgoffload.planning.replay`). Peak memory is planned for the class of the largest rounds: the others free no
more than it takes to stay below its peak.

A plan holds until compute waits for more than it foresees, rounds take longer, or other things are saved. In the first
rounds nothing leaves the device, unless memory is short: of no copy is it known that it is in time.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from deepspeed.utils import logger

from ds_fgoffload.planning.plan_file import Known, PlanStore, is_slower
from ds_fgoffload.planning.planner import Forecast, PlanGoal, plan_round
from ds_fgoffload.planning.replay import waits_ms
from ds_fgoffload.planning.step_model import StepModel
from ds_fgoffload.planning.verdict import verdict
from ds_fgoffload.profiling.profile import RoundProfile
from ds_fgoffload.profiling.recorder import Recorded, Recorder
from ds_fgoffload.schedule.plan import NOTHING_KNOWN, NOTHING_MOVES, Moment, Place, Points
from ds_fgoffload.stats import Measured, Planned
from ds_fgoffload.text.messages import warn
from ds_fgoffload.text.sentences import plan_sentence

LAST_ROUNDS = 3
"""Rounds by which a plan is judged."""
KNOWN_ROUNDS = 12
"""Most rounds of a class for which its plan is made."""
ENOUGH_ROUNDS = 6
"""A class that has so many is planned from them alone."""
OTHERS_ROUNDS = 4
"""Of every other class, so many help to plan one that has fewer."""
CLASS_WIDTH = 0.1
"""Sizes of a class differ from that of its first round by this part at most."""
MOST_CLASSES = 16
DISTORTED = 0.1
"""A round in which compute waited for a larger part of the time says little of how long its stretches are: meanwhile
other things went on for which it would have waited otherwise, such as what the next stage of a pipeline does."""
FITS = 0.05
"""Largest relative difference between the time of a round and the time it was planned for."""
BEARABLE_STALL = 0.002
"""Time that compute may wait unforeseen, as a fraction of the round."""
UNKNOWN = 0.02
"""A plan that has no place for a larger part of what is saved does not fit."""
ANOTHER_STRUCTURE = 0.2
"""If a larger part of the usual moments is gone, or so much is new, earlier rounds are discarded."""
FIRST_CAUTION = 1.01
MORE_CAUTION = 1.03
MOST_CAUTION = 1.5
"""How much slower than measured copies are taken to be: a little, and more each time that compute had to wait."""
EXCESS_WAIT_MARGIN = 0.005
"""Wait beyond what is allowed or foreseen that is tolerated, as a fraction of the round."""
MOST_EXCESS_WAIT = 0.5
"""More wait than that, in rounds, and the plan is given up for a while, which doubles each time."""
PLANS_AT_ONCE = 6
"""Plans that are made as soon as the last does not fit; after that, each must hold twice as many rounds."""
MEASURED_ROUNDS = 12
"""Rounds in which memory and reads are looked at even if the plan seems good."""
QUIET_ROUNDS = 8
"""When plans are stable, or no plan works, or nothing is copied, only one round in this many is timed: timing takes
time."""
WORTH_IT = 0.03
"""A plan that has proved right gives way to one that lowers the peak by so much more of what is saved."""
NEVER = sys.maxsize
FIRST_STORED_ROUND = 16
"""What is known of the rounds is stored after so many, each time that there are twice as many, and at the end."""
UNREAD_ROUNDS = 2
"""Rounds that are over and that nobody has looked at, because none of them came to a backward."""
ROOM = 0.92
"""Of the device's memory; the rest goes to what the allocator cannot use."""
SHORT_OF_MEMORY = 0.7
"""Of the device's memory: when more is allocated and nothing is planned yet, what can leave does, and compute waits."""


class SizeClass:
    """Rounds of about one size, and the plan for them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.known: deque[Recorded] = deque(maxlen=KNOWN_ROUNDS)
        self.last: deque[Recorded] = deque(maxlen=LAST_ROUNDS)
        self.with_memory: Recorded | None = None
        self.forecast: Forecast | None = None
        self.profile: RoundProfile | None = None
        """What the plan was made from."""
        self.model: StepModel | None = None
        self.took_ms = 0.0
        self.most_waits_ms = 0.0
        """Time that compute would have waited in that known round in which it would have waited most."""
        self.wants_plan = False
        self.too_bold = False
        self.caution = FIRST_CAUTION
        self.paused_until = 0
        self.settled = False
        self.proved_rounds = 0
        self.plans = 0
        self.not_before = 0
        self.look_again_at = NEVER

    def distance(self, size: int) -> float:
        return abs(math.log(max(1, size) / max(1, self.size)))

    def add(self, recorded: Recorded) -> None:
        self.known.append(recorded)
        self.last.append(recorded)
        if recorded.with_memory:
            self.with_memory = recorded

    def all_known(self) -> list[Recorded]:
        """The known rounds, and before them that in which memory was last looked at."""
        of_memory = [self.with_memory] if self.with_memory is not None and self.with_memory not in self.known else []
        return [*of_memory, *self.known]

    def length_ms(self, recorded: Recorded) -> float:
        """Of the round with what compute waited, if it had the size that the plan was made for."""
        length_ms = recorded.profile.length_ms + recorded.profile.stalled_ms
        if self.model is None or self.profile is None:
            return length_ms
        there, here = (self.model.length_ms(sizes) for sizes in (self.profile.sizes, recorded.profile.sizes))
        return length_ms * there / here if here and there else length_ms

    def median_ms(self, rounds: Iterable[Recorded]) -> float:
        return max(1e-3, statistics.median(map(self.length_ms, rounds)))

    def undistorted(self) -> list[RoundProfile]:
        """Of the known rounds those in which compute waited little; if they are few, those in which it waited least."""
        profiles = [recorded.profile for recorded in self.known]
        by_distortion = sorted(profiles, key=lambda profile: profile.stalled_ms / max(profile.length_ms, 1e-3))
        count = sum(profile.stalled_ms <= DISTORTED * profile.length_ms for profile in profiles)
        return by_distortion[: max(count, LAST_ROUNDS)]

    def are_of_another_structure(self, rounds: Iterable[Recorded]) -> bool:
        """Whether much of what always came when the plan was made comes in none of ``rounds``, or vice versa."""
        if self.model is None:
            return False
        came = [{passed.moment for passed in recorded.profile.passed} for recorded in rounds]
        usual, all_known = self.model.always, set(self.model.moments)
        gone, new = usual - set().union(*came), set.intersection(*came) - all_known
        return max(len(gone), len(new)) > ANOTHER_STRUCTURE * max(1, len(usual))

    def misses_places(self) -> bool:
        """Whether the plan has no place for much of what was saved in each of the last rounds."""
        if self.forecast is None:
            return False
        positions = self.forecast.points.positions
        return all(
            sum(passed.size_bytes for passed in profile.passed if passed.moment not in positions)
            > UNKNOWN * sum(passed.size_bytes for passed in profile.passed)
            for profile in (recorded.profile for recorded in self.last)
        )


class Tuner:
    """One per attachment.

    Args:
        goal: what the user allows and asks for; None: nothing is planned, because the user has set windows.
        recorder: tells of the rounds.
        store: where what is known of the rounds is kept for later runs.
    """

    def __init__(self, goal: PlanGoal | None, recorder: Recorder, store: PlanStore | None = None) -> None:
        self._goal = goal
        self._recorder = recorder
        self._recorder.measure(measure=goal is not None and not goal.everything)
        self._classes: list[SizeClass] = []
        self._compares = False
        """Whether memory is looked at in the next round that goes by the plan, to compare it with what was foreseen."""
        self._told_verdict = False
        self._held: set[Place] = set()
        self._came: set[Moment] = set()
        self._optional: set[Moment] = set()
        """Moments that came in some rounds and not in others."""
        self._begun = 0
        self._rounds = 0
        self._excess_wait_ms = 0.0
        self._pauses = 0
        self._emptied_for: Points | None = None
        self._cache_is_to_be_emptied = False
        self._store = store
        self._store_at_round = FIRST_STORED_ROUND
        self._learned: list[Recorded] = []
        """Rounds out of the store from which the present plans were made, until the link has been looked at."""
        if goal is not None and store is not None:
            self._adopt(goal, store.known())

    @property
    def forecast(self) -> Forecast | None:
        """What the plan of the largest rounds is expected to do; None: there is none yet."""
        largest = self._largest()
        return None if largest is None else largest.forecast

    def points(self, size: int = 0) -> Points | None:
        """What a round goes by that begins with a micro-batch of ``size`` elements.

        Nothing is read or planned here unless much is unread: the device often has nothing to do at the beginning of a
        step, and would wait for the host.
        """
        if self._recorder.unread_rounds > UNREAD_ROUNDS:
            self.look()
        if self._cache_is_to_be_emptied:
            self._cache_is_to_be_emptied = False
            self._recorder.empty_cache()
        self._begun += 1
        copies_nothing = self._rounds > MEASURED_ROUNDS and not self._classes
        is_quiet = copies_nothing or (
            bool(self._classes) and all(one.settled or one.plans > PLANS_AT_ONCE for one in self._classes)
        )
        self._recorder.takes_times = not is_quiet or self._begun % QUIET_ROUNDS == 0
        return self._points_for(size)

    def lacks_memory(self) -> bool:
        """Whether memory is short while nothing is planned."""
        return (
            self._goal is not None
            and self._recorder.memory_bytes > SHORT_OF_MEMORY * self._recorder.total_bytes()
            and self.forecast is None
        )

    def end(self) -> None:
        """No more rounds will be recorded."""
        self._recorder.end()
        self._keep_what_is_known()
        if self._store is not None:
            self._store.finish()

    def look(self) -> None:
        """Reads what the device has passed since, and plans; best while the device has enough to do.

        At most one class is planned, the largest first: the others do not need to free more than it does.
        """
        while (recorded := self._recorder.read()) is not None:
            self._consider(recorded)
        waiting = [one for one in self._classes if one.wants_plan and self._rounds >= one.not_before]
        if waiting and self._goal is not None and sum(len(one.known) for one in self._classes) >= LAST_ROUNDS:
            self._plan(self._goal, max(waiting, key=lambda one: one.size))
        elif self._begun >= self._store_at_round and self._classes:
            self._store_at_round = 2 * self._begun
            self._keep_what_is_known()

    def learn(self, known: Known) -> None:
        """Takes what an earlier run knew; nothing is planned yet."""
        for size, caution, rounds in known:
            size_class = SizeClass(size)
            size_class.caution = caution
            self._classes.append(size_class)
            for recorded in rounds:
                size_class.add(recorded)
                self._note(recorded.profile)
                self._learned.append(recorded)

    def made_for(self, goal: PlanGoal, size: int | None = None) -> tuple[Forecast, RoundProfile, StepModel]:
        """A plan as it is made for the largest of the known rounds, or for rounds of ``size`` if those are the largest.

        What rounds go by stays as it is. The profile is what the plan was made from, the model what that is of.
        """
        if size is None:
            return self._made(goal, max(self._classes, key=lambda one: one.size))
        nearest = min(self._classes, key=lambda one: one.distance(size))
        return self._made(goal, nearest if nearest.distance(size) <= CLASS_WIDTH else SizeClass(size), size)

    def room_bytes(self) -> int:
        """Device memory for what is allocated at the moments of a round."""
        return self._room_bytes()

    def _adopt(self, goal: PlanGoal, known: Known) -> None:
        """Plans from what an earlier run has learned, before the first round."""
        self.learn(known)
        for size_class in sorted(self._classes, key=lambda one: -one.size):
            self._plan(goal, size_class)

    def _keep_what_is_known(self) -> None:
        if self._store is not None and self.forecast is not None:
            self._store.write([(one.size, one.caution, one.all_known()) for one in self._classes if one.known])

    def _note(self, profile: RoundProfile) -> None:
        """What is held, and what comes and goes."""
        self._held |= profile.held
        came = {passed.moment for passed in profile.passed}
        if self._came:
            self._optional |= self._came ^ came
        self._came |= came

    def _link_is_another(self, size_class: SizeClass) -> bool:
        """Whether the link is much slower than when the stored rounds were measured: then they tell nothing here."""
        found = is_slower(self._learned, size_class.last)
        self._learned = []
        if found is not None and self._store is not None:
            self._store.refuse_link(*found)
        return found is not None

    def _points_for(self, size: int) -> Points | None:
        if self._goal is None:
            return None
        planned = [one for one in self._classes if one.forecast is not None]
        if not planned:
            return None if self._goal.everything or self.lacks_memory() else NOTHING_KNOWN
        # What is in time in smaller rounds is so in larger ones.
        smaller = [one for one in planned if one.size <= size or one.distance(size) <= CLASS_WIDTH]
        nearest = min(smaller or planned, key=lambda one: one.distance(size))
        if self._rounds < nearest.paused_until:
            return NOTHING_MOVES
        assert nearest.forecast is not None
        return nearest.forecast.points

    def _largest(self) -> SizeClass | None:
        """Of the classes that have a plan."""
        return max((one for one in self._classes if one.forecast is not None), key=lambda one: one.size, default=None)

    def _class_of(self, profile: RoundProfile) -> SizeClass:
        # Of several micro-batches only the first one's size is known when a plan is looked up.
        size = profile.sizes[0] if len(profile.sizes) == 1 else 0
        nearest = min(self._classes, key=lambda one: one.distance(size), default=None)
        if nearest is None or (nearest.distance(size) > CLASS_WIDTH and len(self._classes) < MOST_CLASSES):
            nearest = SizeClass(size)
            self._classes.append(nearest)
        return nearest

    def _consider(self, recorded: Recorded) -> None:
        self._rounds += 1
        if self._rounds > MEASURED_ROUNDS and not self._compares:
            self._recorder.measure(measure=False)
        profile = recorded.profile
        if self._goal is None or self._rounds == 1 or not profile.d2h_bytes_per_ms:
            return
        size_class = self._class_of(profile)
        size_class.add(recorded)
        self._note(profile)
        changed = size_class.are_of_another_structure([recorded])
        last = size_class.last
        if len(last) == LAST_ROUNDS and (
            (self._learned and self._link_is_another(size_class))
            or (changed and size_class.are_of_another_structure(last))
        ):
            size_class = self._begin_anew(size_class)
        forecast = size_class.forecast
        if forecast is None:
            size_class.wants_plan = True
            return
        self._compare(size_class, forecast, recorded)
        self._count_excess_wait(size_class, forecast, recorded)
        if changed or len(size_class.last) < LAST_ROUNDS or size_class.wants_plan:
            size_class.settled = size_class.settled and not changed
            return
        fits = self._fits(size_class, forecast)
        size_class.settled = fits and self._rounds > MEASURED_ROUNDS and size_class.look_again_at == NEVER
        size_class.wants_plan = not fits
        if fits:
            if size_class is self._largest():
                self._empty_cache_once(recorded)
            self._improve(self._goal, size_class)

    def _begin_anew(self, before: SizeClass) -> SizeClass:
        """The model does other things now than it did: only the last rounds tell of it."""
        size_class = SizeClass(before.size)
        self._classes = [size_class]
        self._held.clear()
        self._came.clear()
        self._optional.clear()
        for recorded in before.last:
            size_class.add(recorded)
            self._held |= recorded.profile.held
        return size_class

    def _compare(self, size_class: SizeClass, forecast: Forecast, recorded: Recorded) -> None:
        """What was measured of a round with what was foreseen, for the user: once the plan has settled."""
        profile, model = size_class.profile, size_class.model
        if size_class is not self._largest() or recorded.points is not forecast.points:
            return
        if not recorded.with_memory or profile is None or model is None:
            return
        then_bytes, now_bytes = (model.bytes_saved(of.sizes) for of in (profile, recorded.profile))
        larger = now_bytes / then_bytes if then_bytes else 1.0
        least_bytes = min(passed.memory_bytes for passed in profile.passed)
        self._compares = False
        self._recorder.rounds.measured = Measured(
            saved_bytes=_saved_bytes(recorded.profile),
            foreseen_saved_bytes=round(larger * _saved_bytes(profile)),
            peak_bytes=recorded.highest_bytes,
            foreseen_peak_bytes=round(least_bytes + larger * max(0, forecast.peak_bytes - least_bytes)),
            stalled_ms=recorded.profile.stalled_ms,
            foreseen_stalled_ms=forecast.stalled_ms,
            length_ms=recorded.profile.length_ms,
        )

    def _count_excess_wait(self, size_class: SizeClass, forecast: Forecast, recorded: Recorded) -> None:
        """What compute waits beyond what is allowed is bounded: the plan is given up before it adds up."""
        assert self._goal is not None
        profile = recorded.profile
        if self._goal.everything or recorded.points is not forecast.points or self._must_free(size_class):
            return
        allowed_ms = max(forecast.stalled_ms, (self._goal.max_overhead or 0.0) * profile.length_ms)
        excess_ms = profile.stalled_ms - allowed_ms - EXCESS_WAIT_MARGIN * profile.length_ms
        self._excess_wait_ms = max(0.0, self._excess_wait_ms + excess_ms)
        if self._excess_wait_ms > MOST_EXCESS_WAIT * profile.length_ms:
            self._excess_wait_ms = 0.0
            self._pauses += 1
            size_class.paused_until = self._rounds + 2**self._pauses
            size_class.wants_plan = size_class.too_bold = True

    def _must_free(self, size_class: SizeClass) -> bool:
        """Whether the rounds would not fit on the device if nothing left it."""
        profile = size_class.profile
        return profile is not None and profile.peak_bytes > self._room_bytes()

    def _room_bytes(self) -> int:
        between = max((one.with_memory.peak_between_bytes for one in self._classes if one.with_memory), default=0)
        return int(ROOM * self._recorder.total_bytes()) - between

    def _fits(self, size_class: SizeClass, forecast: Forecast) -> bool:
        """Whether the plan is right for the last rounds. Rounds that did not follow it do not count."""
        points, last = forecast.points, size_class.last
        if size_class.misses_places() or (points.moved is not None and not points.moved.isdisjoint(self._held)):
            return False
        if any(recorded.points is not points for recorded in last):
            return True
        profiles = [recorded.profile for recorded in last]
        assert size_class.profile is not None
        if size_class.profile.guessed and not any(profile.guessed for profile in profiles):
            size_class.known = deque(last, KNOWN_ROUNDS)
            return False
        # All of them: one alone may be long for want of memory in the cache, or when Python collects its garbage.
        are_slower = min(map(size_class.length_ms, last)) > (1 + FITS) * size_class.took_ms
        if are_slower and self._rounds >= size_class.look_again_at:
            return False
        if not are_slower:
            size_class.look_again_at = NEVER
        elif size_class.look_again_at == NEVER:
            # then those that were faster are forgotten
            size_class.look_again_at = self._rounds + KNOWN_ROUNDS * max(1, len(self._classes))
        took_ms = size_class.median_ms(last)
        stalled_ms = statistics.median(profile.stalled_ms for profile in profiles)
        foreseen_ms = max(forecast.stalled_ms, size_class.most_waits_ms)
        are_shorter = took_ms < (1 - FITS) * size_class.took_ms
        if are_shorter and self._goal is not None and self._goal.max_overhead:  # less is allowed then
            foreseen_ms *= took_ms / size_class.took_ms
        waits = stalled_ms > foreseen_ms + BEARABLE_STALL * size_class.took_ms
        if waits and are_shorter:  # what was usual is not any more
            size_class.known = deque(
                (one for one in size_class.known if size_class.length_ms(one) <= (1 + FITS) * took_ms), KNOWN_ROUNDS
            )
        as_long = abs(took_ms - size_class.took_ms) <= FITS * size_class.took_ms
        size_class.too_bold = waits and as_long and not any(profile.guessed for profile in profiles)
        return not waits or (points.within_window and as_long)  # what a window costs, no plan can help

    def _plan(self, goal: PlanGoal, size_class: SizeClass) -> None:
        """Makes a plan, because there is none, or the last is not right for the rounds that are known."""
        if not goal.everything and all(one.with_memory is None for one in self._classes):
            self._recorder.measure(measure=True)
            return
        if size_class.too_bold:
            size_class.caution = min(MOST_CAUTION, size_class.caution * MORE_CAUTION)
            size_class.too_bold = False
        self._follow(size_class, *self._made(goal, size_class))
        if self._rounds >= size_class.look_again_at:
            size_class.look_again_at = NEVER
        size_class.plans += 1
        more = size_class.plans - PLANS_AT_ONCE
        size_class.not_before = self._rounds + (2 ** min(more, 10) if more > 0 else 0)

    def _improve(self, goal: PlanGoal, size_class: SizeClass) -> None:
        """The plan has proved right; now and then a bolder one is made, should the link have been disturbed before."""
        size_class.proved_rounds += 1
        if not size_class.settled or size_class.proved_rounds % KNOWN_ROUNDS or goal.everything:
            return
        assert size_class.forecast is not None
        assert size_class.profile is not None
        forecast, profile, model = self._made(goal, size_class)
        now, then = _planned(size_class.forecast, size_class.profile), _planned(forecast, profile)
        if (then.freed_bytes or 0) > (now.freed_bytes or 0) + WORTH_IT * then.saved_bytes:
            self._follow(size_class, forecast, profile, model)

    def _made(
        self, goal: PlanGoal, size_class: SizeClass, size: int | None = None
    ) -> tuple[Forecast, RoundProfile, StepModel]:
        """A plan for the rounds of this class, or of just this size, what it was made from, and the model of that."""
        model = self._model(size_class)
        sizes: Sequence[int] = ()
        if size_class.size:
            own = [recorded.profile.sizes[0] for recorded in size_class.known]
            sizes = (size or (round(statistics.median(own)) if own else size_class.size),)
        profile = self._typical(model, sizes, usual=bool(goal.max_overhead))
        if goal.everything:
            return plan_round(profile, goal, caution=size_class.caution), profile, model
        goal = replace(goal, room_bytes=self._room_bytes())
        largest = self._largest()
        if largest is not None and largest.size > size_class.size and largest.forecast is not None:
            above_bytes = profile.peak_bytes - largest.forecast.peak_bytes
            if above_bytes <= 0:
                return _nothing(model, profile), profile, model
            goal = replace(goal, target_saved_bytes=above_bytes, max_overhead=goal.max_overhead or 0.0)
        forecast = plan_round(profile, goal, caution=size_class.caution)
        by_round_ms = waits_ms(forecast.points, model.scenarios(profile.sizes))
        allowed_ms = max(forecast.stalled_ms, (goal.max_overhead or 0.0) * profile.length_ms)
        if (
            model.is_always_the_same
            and model.saves_alike(sizes)
            and by_round_ms.mean() <= allowed_ms + BEARABLE_STALL * profile.length_ms
        ):
            size_class.most_waits_ms = float(by_round_ms.max())
            forecast = forecast._replace(stalled_ms=max(forecast.stalled_ms, float(by_round_ms.mean())))
            return self._if_it_pays(forecast, profile, goal, model), profile, model
        # The rounds are not like a typical one: the plan says what moves, and when it does follows from what comes.
        size_class.most_waits_ms = 0.0
        profile = self._typical(model, sizes, usual=True)
        forecast = plan_round(profile, goal, caution=size_class.caution)
        if profile.peak_bytes > self._room_bytes():
            allowed_ms = math.inf
        times = model.timetable(sizes, size_class.caution, allowed_ms)
        forecast = forecast._replace(points=replace(forecast.points, times=times))
        return self._if_it_pays(forecast, profile, goal, model), profile, model

    def _if_it_pays(self, forecast: Forecast, profile: RoundProfile, goal: PlanGoal, model: StepModel) -> Forecast:
        largest = self._largest()
        if largest is not None and profile.sizes and largest.size > profile.sizes[0]:
            return forecast  # it frees what its rounds need above the peak of the largest, however little that is
        why_not = verdict(profile, forecast, goal)
        return forecast if why_not is None else _nothing(model, profile)._replace(verdict=why_not)

    def _typical(self, model: StepModel, sizes: Sequence[int], *, usual: bool) -> RoundProfile:
        # What is held is seen only in rounds in which it is to leave.
        return replace(model.round_of(sizes, usual=usual), held=frozenset(self._held))

    def _model(self, size_class: SizeClass) -> StepModel:
        """Of the class's rounds; if they are few, of other classes' as well."""
        rounds = size_class.undistorted()
        if len(rounds) < ENOUGH_ROUNDS:
            for other in self._classes:
                if other is not size_class:
                    rounds += other.undistorted()[-OTHERS_ROUNDS:]
        with_memory = [one.with_memory.profile for one in self._classes if one.with_memory is not None]
        if size_class.with_memory is not None and len(size_class.known) >= ENOUGH_ROUNDS:
            with_memory = [size_class.with_memory.profile]
        return StepModel(
            rounds, with_memory, rates_of=[one.profile for one in size_class.known], optional=self._optional
        )

    def _follow(self, size_class: SizeClass, forecast: Forecast, profile: RoundProfile, model: StepModel) -> None:
        before = self._largest()
        peak_before_bytes = None if before is None or before.forecast is None else before.forecast.peak_bytes
        size_class.forecast, size_class.profile, size_class.model = forecast, profile, model
        size_class.took_ms = size_class.median_ms(size_class.last or size_class.known)
        size_class.last.clear()
        size_class.settled = size_class.wants_plan = False
        size_class.proved_rounds = 0
        if size_class is not self._largest():
            return
        planned = self._recorder.rounds.planned = _planned(forecast, profile)
        self._recorder.rounds.measured = None
        self._compares = planned.peak_bytes is not None
        self._recorder.measure(measure=self._compares)
        if forecast.verdict is not None and not self._told_verdict:
            self._told_verdict = True
            warn(f"fine_grained_offload: {forecast.verdict}")
        logger.debug(f"fine_grained_offload: after {self._rounds} rounds {plan_sentence(planned)}")
        if peak_before_bytes is None or abs(forecast.peak_bytes - peak_before_bytes) > WORTH_IT * planned.saved_bytes:
            for smaller in self._classes:
                smaller.wants_plan = smaller.wants_plan or smaller is not size_class

    def _empty_cache_once(self, recorded: Recorded) -> None:
        """Of what rounds before the plan have left in the allocator's cache, in sizes of their own."""
        if self.forecast is not None and self.forecast.points is recorded.points is not self._emptied_for:
            self._emptied_for = recorded.points
            self._cache_is_to_be_emptied = True


def _nothing(model: StepModel, profile: RoundProfile) -> Forecast:
    """The plan by which everything stays."""
    positions = {moment: position for position, moment in enumerate(model.moments)}
    return Forecast(Points(positions, {}, {}, frozenset()), profile.peak_bytes, 0.0, 0)


def _planned(forecast: Forecast, profile: RoundProfile) -> Planned:
    without_bytes = profile.peak_bytes or None
    return Planned(
        forecast.copied_bytes,
        saved_bytes=_saved_bytes(profile),
        stalled_ms=forecast.stalled_ms,
        length_ms=profile.length_ms,
        peak_bytes=None if without_bytes is None else forecast.peak_bytes,
        peak_without_bytes=without_bytes,
        verdict=forecast.verdict,
    )


def _saved_bytes(profile: RoundProfile) -> int:
    return sum(passed.size_bytes for passed in profile.passed)
