"""A model of the step: what is saved where, and how long each stretch of compute takes, as functions of the sizes seen.

The size of a micro-batch is the number of elements that the root is called with: known before anything is saved, and in
proportion to its tokens. Over the profiled rounds, each stretch of time, each saved place and the memory at each moment
is fitted by least squares as a polynomial of the size: constant where sizes hardly differ, affine over few sizes,
quadratic over more (attention). A profiled round is then *carried over* to another size by the ratio of the fit there
and at its own size, so that what made it differ from others of its size, experts with other token counts or the host's
delays, stays in it. The rounds carried over are the ways in which a round of that size may go; a typical one is made of
them to plan for, and :mod:`~ds_fgoffload.planning.replay` tries the plan on each.

Moments that do not come in every round (an expert without tokens, a dropped layer) are in the model where they would
come; in a round without them they take no time and save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_fgoffload.planning.simulator import SPARE_TIME_MS
from ds_fgoffload.profiling.profile import ProfiledMoment, RoundProfile
from ds_fgoffload.schedule.plan import Kind, Moment, Timetable

Floats = npt.NDArray[np.float64]

ALIKE = 1.02
"""Sizes that differ by a smaller factor are one."""
CURVED = 1.5
"""A curve is fitted only over sizes whose largest is so many times the smallest."""
MOST_LENGTHENED = 1.05
"""The shortest times of the stretches are scaled up by at most this factor, towards the shortest measured round: in
rounds that hardly differ, the rest is stretches that are long now and then."""
TRIMMED = 0.2
"""The part of the samples, at either end, that a mean leaves out."""


@dataclass(frozen=True)
class Scenarios:
    """Rounds of one size as they may go, one in each row of the arrays; columns are the moments of the model."""

    moments: Sequence[Moment]
    times_ms: Floats
    """When each moment comes; one that does not come in a round has the time of the one before it."""
    next_ms: Floats
    """When each moment or, where it does not come, the next one comes: what waits for it happens then."""
    saved_bytes: Floats
    """At moments at which something is saved."""
    read_ms: Floats
    """When the host, waiting for the device before the moment, went on; NaN: it did not wait."""
    d2h_bytes_per_ms: float
    h2d_bytes_per_ms: float

    @property
    def lengths_ms(self) -> Floats:
        return np.asarray(self.times_ms[:, -1] - self.times_ms[:, 0])


class StepModel:
    """Learned from profiled rounds.

    Args:
        rounds: at least one; how long they take, and what they save.
        with_memory: rounds in which memory was looked at. What is read of the device is as in them, too.
        rates_of: the rounds of which the lowest rates of the link are taken; None: ``rounds``.
        optional: moments that did not come in every round that was ever seen.
    """

    def __init__(
        self,
        rounds: Sequence[RoundProfile],
        with_memory: Sequence[RoundProfile] = (),
        rates_of: Sequence[RoundProfile] | None = None,
        optional: AbstractSet[Moment] = frozenset(),
    ) -> None:
        timed = len(rounds)
        self._rates_of = rates_of or rounds
        self._rounds = rounds = [*rounds, *with_memory]
        self.moments = merged_order(rounds)
        self._same = all(len(profile.passed) == len(self.moments) for profile in rounds)
        micro_batches = max(len(profile.sizes) for profile in rounds)
        # Of several micro-batches in flight only the first one's size is known when a plan is chosen.
        self._by_size = micro_batches == 1
        sizes = [float(profile.sizes[0]) if self._by_size and profile.sizes else 1.0 for profile in rounds]
        self._all_sizes = np.maximum(1.0, np.array(sizes))
        self._sizes = self._all_sizes[:timed]
        self._degree = _degree(self._sizes)
        self._fill(timed)
        self._always = self._present.all(axis=0) & np.array([moment not in optional for moment in self.moments], bool)

    @property
    def is_always_the_same(self) -> bool:
        """Whether each moment comes in each round."""
        return bool(self._always.all())

    @property
    def always(self) -> set[Moment]:
        """The moments that come in every round."""
        return {self.moments[position] for position in np.flatnonzero(self._always)}

    def round_of(self, sizes: Sequence[int], *, usual: bool = False) -> RoundProfile:
        """The round that is to be expected at ``sizes``, elements by micro-batch.

        Args:
            sizes: of a round of one micro-batch; those of several are taken as they come.
            usual: median or mean stretches, instead of the shortest that are to be expected: what is in time in
                the shortest round that the known ones let expect is in time in each of them.
        """
        rows = self.scenarios(sizes)
        passed = self._times(rows, usual=usual)
        memory, reads = self._memory_and_reads(sizes)
        saved_bytes = rows.saved_bytes.mean(axis=0)
        moments: list[ProfiledMoment] = []
        for position, moment in enumerate(self.moments):
            at_ms = float(passed[position])
            read_at_ms = None
            if not np.isnan(reads[position]):
                before_ms = moments[-1].at_ms if moments else at_ms
                read_at_ms = max(before_ms, at_ms - float(reads[position]))
            size_bytes = round(float(saved_bytes[position]))
            moments.append(ProfiledMoment(moment, at_ms, size_bytes, round(float(memory[position])), read_at_ms))
        return replace(
            self._rounds[-1],
            passed=moments,
            d2h_bytes_per_ms=rows.d2h_bytes_per_ms,
            h2d_bytes_per_ms=rows.h2d_bytes_per_ms,
            held=frozenset().union(*(profile.held for profile in self._rounds)),
            stalled_ms=0.0,
            sizes=tuple(sizes),
        )

    def scenarios(self, sizes: Sequence[int]) -> Scenarios:
        """The known rounds, carried over to ``sizes``."""
        times_ms = np.cumsum(self._carried(self._stretches_ms, sizes, self._degree), axis=1)
        saved_bytes = self._carried(self._saved_bytes, sizes, min(1, self._degree))
        present = self._present
        next_ms = times_ms
        if not present.all():
            next_ms = np.where(present, times_ms, np.inf)
            next_ms = np.minimum.accumulate(next_ms[:, ::-1], axis=1)[:, ::-1]
            next_ms = np.where(np.isinf(next_ms), times_ms[:, -1:], next_ms)
        return Scenarios(
            self.moments,
            times_ms,
            next_ms,
            saved_bytes,
            times_ms - self._after_reads_ms,
            min(profile.d2h_bytes_per_ms for profile in self._rates_of),
            min(profile.h2d_bytes_per_ms for profile in self._rates_of),
        )

    def saves_alike(self, sizes: Sequence[int]) -> bool:
        """Whether rounds of ``sizes`` save about as much at each place as one another."""
        saved_bytes = self._carried(self._saved_bytes, sizes, min(1, self._degree))
        usual_bytes = np.median(saved_bytes, axis=0)
        differ_bytes = np.abs(saved_bytes - usual_bytes).sum(axis=1)
        return bool(np.median(differ_bytes) <= (ALIKE - 1) * max(1.0, usual_bytes.sum()))

    def timetable(self, sizes: Sequence[int], caution: float, allowed_ms: float) -> Timetable:
        """How long the stretches of a round of ``sizes`` take where they come, and what is saved where."""
        rows = self.scenarios(sizes)
        stretches_ms = np.diff(rows.times_ms, axis=1, prepend=rows.times_ms[:, :1])
        foreseen_ms, saved_bytes = np.zeros(len(self.moments)), {}
        expected_ms, found_ms = [np.zeros(0)], [np.zeros(0)]
        for column, (moment, there) in enumerate(zip(self.moments, self._present.T, strict=True)):
            if not there.any():
                continue
            foreseen_ms[column] = _trimmed_mean(stretches_ms[there, column])
            size_bytes = rows.saved_bytes[there, column]
            if moment.kind is Kind.SAVED and size_bytes.any():
                saved_bytes[moment.place] = int(size_bytes.mean())
                expected_ms.append(foreseen_ms[column] * (size_bytes / size_bytes.mean() - 1))
                found_ms.append(stretches_ms[there, column] - foreseen_ms[column])
        expected, found = np.concatenate(expected_ms), np.concatenate(found_ms)
        varies = float(expected @ expected)
        return Timetable(
            foreseen_ms.tolist(),
            saved_bytes,
            rows.d2h_bytes_per_ms / caution,
            rows.h2d_bytes_per_ms / caution,
            caution * SPARE_TIME_MS,
            min(1.0, max(0.0, float(expected @ found) / varies)) if varies else 0.0,
            allowed_ms,
        )

    def length_ms(self, sizes: Sequence[int]) -> float:
        """How long compute is expected to take."""
        return float(self._value(self._stretches_ms.sum(axis=1)[:, None], sizes, self._degree)[0])

    def bytes_saved(self, sizes: Sequence[int]) -> float:
        """How much is expected to be saved."""
        return float(self._value(self._saved_bytes.sum(axis=1)[:, None], sizes, min(1, self._degree))[0])

    def _fill(self, timed: int) -> None:
        shape = len(self._rounds), len(self.moments)
        self._present = np.ones(shape, bool)
        self._stretches_ms, self._saved_bytes, self._memory_bytes = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._after_reads_ms = np.full(shape, np.nan)
        columns = {moment: column for column, moment in enumerate(self.moments)}
        for row, profile in enumerate(self._rounds):
            where: Any = slice(None)
            if not self._same:
                # One that comes where the model has it elsewhere, as experts in another order, counts as not there.
                order, last = [], -1
                for number, passed in enumerate(profile.passed):
                    column = columns[passed.moment]
                    if column > last:
                        order.append((column, number))
                        last = column
                where = np.array([column for column, _ in order], int)
                self._present[row] = False
                self._present[row, where] = True
                numbers = [number for _, number in order]
            else:
                numbers = range(len(profile.passed))  # type: ignore[assignment]
            chosen = [profile.passed[number] for number in numbers]
            at_ms = np.array([passed.at_ms for passed in chosen])
            self._stretches_ms[row, where] = np.diff(at_ms, prepend=at_ms[:1])
            self._saved_bytes[row, where] = [
                passed.size_bytes if passed.moment.kind is Kind.SAVED else 0 for passed in chosen
            ]
            self._memory_bytes[row, where] = [passed.memory_bytes for passed in chosen]
            reads = [np.nan if passed.read_at_ms is None else passed.at_ms - passed.read_at_ms for passed in chosen]
            self._after_reads_ms[row, where] = reads
        if not self._same:
            self._memory_bytes = _held_on(self._memory_bytes, self._present)
        self._reads_of_all_ms = self._after_reads_ms
        self._present_in_all, self._present = self._present, self._present[:timed]
        self._stretches_ms, self._saved_bytes = self._stretches_ms[:timed], self._saved_bytes[:timed]
        self._after_reads_ms = self._after_reads_ms[:timed]

    def _times(self, rows: Scenarios, *, usual: bool) -> Floats:
        """When each moment of a typical round comes."""
        stretches_ms = np.diff(rows.times_ms, axis=1, prepend=rows.times_ms[:, :1])
        shortest_ms = stretches_ms.min(axis=0)
        usual_ms = np.median(stretches_ms, axis=0) if self._same else _trimmed_mean(stretches_ms)
        total_ms = float(np.median(rows.lengths_ms))
        if usual:
            spread = total_ms / max(float(usual_ms.sum()), 1e-3)
            return np.asarray(np.cumsum(usual_ms * (spread if not self._same else 1.0)))
        total_ms = float(rows.lengths_ms.min())
        longer = total_ms / max(float(shortest_ms.sum()), 1e-3)
        if longer <= MOST_LENGTHENED:
            return np.asarray(np.cumsum(longer * shortest_ms))
        if self._same and self._alike(stretches_ms):
            return np.asarray(np.cumsum(MOST_LENGTHENED * shortest_ms))
        # Each stretch is short in some round, and no round is short throughout: copies last over many stretches.
        mean_ms = _trimmed_mean(stretches_ms)
        part = (total_ms - shortest_ms.sum()) / max(float(mean_ms.sum() - shortest_ms.sum()), 1e-3)
        return np.asarray(np.cumsum(shortest_ms + min(1.0, max(0.0, float(part))) * (mean_ms - shortest_ms)))

    @staticmethod
    def _alike(stretches_ms: Floats) -> bool:
        """Whether few stretches make the rounds differ, rather than each a little."""
        median_ms = np.median(stretches_ms, axis=0)
        deviation_ms = np.median(np.abs(stretches_ms - median_ms), axis=0)
        return float(deviation_ms.sum()) <= 0.05 * max(float(median_ms.sum()), 1e-3)

    def _memory_and_reads(self, sizes: Sequence[int]) -> tuple[Floats, Floats]:
        """By moment: memory as in the round with the most of it, and the time after a read that most rounds have."""
        known = self._memory_bytes.any(axis=1)
        memory = np.zeros(len(self.moments))
        if known.any():
            degree = min(1, _degree(self._all_sizes[known]))
            # Weights and what else is always there do not grow with the size.
            always = np.where(self._present_in_all[known], self._memory_bytes[known], np.inf).min(axis=1, keepdims=True)
            more = np.maximum(0.0, self._memory_bytes[known] - always)
            carried = always + self._carried(more, sizes, degree, self._all_sizes[known])
            memory = carried[int(carried.max(axis=1).argmax())]
        reads_known = ~np.isnan(self._reads_of_all_ms)
        usual = reads_known.sum(axis=0) * 2 > self._present_in_all.sum(axis=0)
        after = np.where(reads_known, self._reads_of_all_ms, 0.0).sum(axis=0) / np.maximum(1, reads_known.sum(axis=0))
        return memory, np.where(usual, after, np.nan)

    def _carried(self, samples: Floats, sizes: Sequence[int], degree: int, of_rows: Floats | None = None) -> Floats:
        """``samples``, a row of each round, as they would be at ``sizes``."""
        rows = self._sizes if of_rows is None else of_rows
        if not degree:
            scale = self._target(sizes) / rows.mean() if self._by_size and sizes else 1.0
            return samples if abs(scale - 1) < ALIKE - 1 else samples * scale
        there, here = self._value(samples, sizes, degree, rows), self._fitted(samples, degree, rows)
        usable = (here > 1e-9) & (there > 0)
        ratio = np.where(usable, there / np.where(usable, here, 1.0), 1.0)
        ratio = np.where((ratio > 0.05) & (ratio < 20), ratio, 1.0)
        shift = np.where(usable, 0.0, there - here)
        return np.asarray(np.maximum(0.0, samples * ratio + np.where(samples > 0, shift, 0.0)))

    def _target(self, sizes: Sequence[int]) -> float:
        return max(1.0, float(sizes[0])) if self._by_size and sizes else 1.0

    def _value(self, samples: Floats, sizes: Sequence[int], degree: int, of_rows: Floats | None = None) -> Floats:
        """The fit at ``sizes``; outside the sizes seen it goes on in proportion."""
        rows = self._sizes if of_rows is None else of_rows
        target = self._target(sizes)
        within = min(max(target, float(rows.min())), float(rows.max())) if self._by_size else 1.0
        scale = target / within if self._by_size and sizes else 1.0
        unit = float(rows.mean())
        value = _powers(np.array([within / unit]), degree) @ _fit(rows / unit, samples, degree)
        return np.asarray(np.maximum(0.0, value[0] * scale))

    def _fitted(self, samples: Floats, degree: int, rows: Floats) -> Floats:
        unit = float(rows.mean())
        powers = _powers(rows / unit, degree)
        return np.asarray(np.maximum(0.0, powers @ _fit(rows / unit, samples, degree)))


def merged_order(rounds: Sequence[RoundProfile]) -> list[Moment]:
    """All moments of the rounds: those of the longest, and each other one after what came before it in its round."""
    longest = max(rounds, key=lambda profile: len(profile.passed))
    order = [passed.moment for passed in longest.passed]
    for profile in rounds:
        moments = [passed.moment for passed in profile.passed]
        if profile is longest or moments == order:
            continue
        known = set(order)
        after: dict[Moment | None, list[Moment]] = {}
        last: Moment | None = None
        for moment in moments:
            if moment in known:
                last = moment
            else:
                after.setdefault(last, []).append(moment)
        if after:
            merged = list(after.get(None, ()))
            for moment in order:
                merged.append(moment)
                merged.extend(after.get(moment, ()))
            order = merged
    return order


def _degree(sizes: Floats) -> int:
    distinct = len({round(float(np.log(size)) / float(np.log(ALIKE))) for size in sizes})
    spread = float(sizes.max() / sizes.min())
    if spread < ALIKE or distinct < 2:
        return 0
    return 2 if distinct >= 4 and spread >= CURVED else 1


def _powers(sizes: Floats, degree: int) -> Floats:
    return np.vander(sizes, degree + 1, increasing=True)


def _fit(sizes: Floats, samples: Floats, degree: int) -> Floats:
    if not degree:
        return np.asarray(samples.mean(axis=0, keepdims=True))
    return np.asarray(np.linalg.lstsq(_powers(sizes, degree), samples, rcond=None)[0])


def _trimmed_mean(samples: Floats) -> Floats:
    out = int(TRIMMED * len(samples))
    return np.asarray(np.sort(samples, axis=0)[out : len(samples) - out].mean(axis=0))


def _held_on(values: Floats, present: npt.NDArray[np.bool_]) -> Floats:
    """Where a moment does not come, the value of the one before it."""
    last = np.maximum.accumulate(np.where(present, np.arange(values.shape[1]), 0), axis=1)
    return np.asarray(np.take_along_axis(values, last, axis=1))
