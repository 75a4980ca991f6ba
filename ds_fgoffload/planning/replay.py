"""A plan, made for one typical round, tried on the rounds as they may go, and adapted to them.

:func:`waits_ms` tells how long compute would wait, :func:`in_time` moves the points to where it would not. All rounds
are replayed at once, a row of an array for each; the link works as in :mod:`~ds_fgoffload.planning.simulator`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from ds_fgoffload.planning.simulator import SPARE_TIME_MS
from ds_fgoffload.planning.step_model import Floats, Scenarios
from ds_fgoffload.profiling.profile import RoundProfile
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Points

_RELOAD, _NEED, _COPY, _RELEASE = range(4)


def in_time(points: Points, rounds: Scenarios, *, part: float, caution: float = 1.0) -> Points:
    """``points`` with later releases and earlier reloads, so that of each copy ``part`` of the rounds wait for none.

    What would have to come back before it has left is not moved.

    Args:
        points: their positions are those of the moments of ``rounds``.
        rounds: how rounds may go.
        part: 1: none of the rounds waits.
        caution: by how much copies are taken to be slower than was measured, and spare times longer.
    """
    while True:
        release = _release_positions(points, rounds, part, caution)
        reload = _reload_positions(points, rounds, part, caution)
        stay = {place for place in points.release if release[place] >= reload[place]}
        if not stay:
            return replace(points, release=release, reload=reload, moved=frozenset(release))
        release, reload = ({p: at for p, at in of.items() if p not in stay} for of in (points.release, points.reload))
        points = replace(points, release=release, reload=reload, moved=frozenset(release))


def peak_bytes(points: Points, profile: RoundProfile) -> int:
    """Memory of the round at its highest, if it goes by ``points``, whose positions are the profile's."""
    away = np.zeros(len(profile.passed) + 1, np.int64)
    for place, begin in points.release.items():
        size_bytes = profile.passed[points.positions[Moment(Kind.SAVED, place)]].size_bytes
        away[begin + 1] += size_bytes
        away[points.reload[place] + 1] -= size_bytes
    memory = np.array([passed.memory_bytes for passed in profile.passed], np.int64)
    return max(0, int((memory - np.cumsum(away)[:-1]).max(initial=0)))


def waits_ms(points: Points, rounds: Scenarios, caution: float = 1.0) -> Floats:
    """By round, the time for which compute, or a blocking read, would wait for copies.

    Args:
        points: their positions are those of the moments of ``rounds``.
        rounds: how rounds may go.
        caution: by how much copies are taken to be slower than was measured.
    """
    count = len(rounds.times_ms)
    waited, d2h_end, h2d_end = np.zeros(count), np.zeros(count), np.zeros(count)
    out_end: dict[Place, Floats] = {}
    in_end: dict[Place, Floats] = {}
    reads = np.logical_not(np.isnan(rounds.read_ms).all(axis=0))
    for position, events in groupby(_events(points, reads), key=itemgetter(0)):
        for _, kind, place in events:
            if place is None:
                now = rounds.read_ms[:, position] + waited
                waited = waited + np.where(np.isnan(now), 0.0, np.maximum(0.0, d2h_end - now))
                continue
            size_bytes = rounds.saved_bytes[:, points.positions[Moment(Kind.SAVED, place)]]
            there = size_bytes > 0
            if kind == _COPY:
                begin = np.maximum(d2h_end, rounds.times_ms[:, position] + waited)
                d2h_end = np.where(there, begin + caution * size_bytes / rounds.d2h_bytes_per_ms, d2h_end)
                out_end[place] = d2h_end
            elif kind == _RELEASE:
                late = out_end[place] - (rounds.next_ms[:, position] + waited)
                waited = waited + np.where(there, np.maximum(0.0, late), 0.0)
            elif kind == _RELOAD:
                begin = np.maximum(h2d_end, rounds.next_ms[:, position] + waited)
                h2d_end = np.where(there, begin + caution * size_bytes / rounds.h2d_bytes_per_ms, h2d_end)
                in_end[place] = h2d_end
            else:
                late = in_end[place] - (rounds.times_ms[:, position] + waited)
                waited = waited + np.where(there, np.maximum(0.0, late), 0.0)
    return waited


def _release_positions(points: Points, rounds: Scenarios, part: float, caution: float) -> dict[Place, int]:
    """The first from which on each copy is over in ``part`` of the rounds, but not before the given one."""
    end_ms = np.zeros(len(rounds.times_ms))
    found: dict[Place, int] = {}
    for place in _in_order_of(Kind.SAVED, points):
        saved = points.positions[Moment(Kind.SAVED, place)]
        size_bytes = rounds.saved_bytes[:, saved]
        there = size_bytes > 0
        begin_ms = np.maximum(end_ms, rounds.times_ms[:, saved])
        end_ms = np.where(there, begin_ms + caution * size_bytes / rounds.d2h_bytes_per_ms, end_ms)
        free_ms = end_ms + caution * SPARE_TIME_MS
        first = [
            int(np.searchsorted(row_ms, row_free_ms))
            for row_ms, row_free_ms in zip(rounds.next_ms[there], free_ms[there], strict=True)
        ]
        found[place] = max(points.release[place], _first_of(first, part, default=points.release[place]))
    return found


def _reload_positions(points: Points, rounds: Scenarios, part: float, caution: float) -> dict[Place, int]:
    """The last from which on each copy back is over in time in ``part`` of the rounds, but not after the given one."""
    begin_ms = np.full(len(rounds.times_ms), np.inf)
    found: dict[Place, int] = {}
    for place in reversed(_in_order_of(Kind.NEEDED, points)):
        size_bytes = rounds.saved_bytes[:, points.positions[Moment(Kind.SAVED, place)]]
        there = size_bytes > 0
        needed_ms = rounds.times_ms[:, points.positions[Moment(Kind.NEEDED, place)]] - caution * SPARE_TIME_MS
        last_ms = np.minimum(begin_ms, needed_ms) - caution * size_bytes / rounds.h2d_bytes_per_ms
        begin_ms = np.where(there, last_ms, begin_ms)
        last = [
            -int(np.searchsorted(row_ms, row_begin_ms, side="right") - 1)
            for row_ms, row_begin_ms in zip(rounds.next_ms[there], begin_ms[there], strict=True)
        ]
        latest = -_first_of(last, part, default=-points.reload[place])
        found[place] = max(0, min(points.reload[place], latest))
    return found


def _first_of(positions: list[int], part: float, *, default: int) -> int:
    """The least position that is no less than ``part`` of them."""
    if not positions:
        return default
    return sorted(positions)[max(0, int(np.ceil(part * len(positions))) - 1)]


def _in_order_of(kind: Kind, points: Points) -> list[Place]:
    return sorted(points.release, key=lambda place: points.positions[Moment(kind, place)])


def _events(points: Points, reads: npt.NDArray[np.bool_]) -> list[tuple[int, int, Place | None]]:
    """(position, kind, place) in their order; of a read, no place."""
    events: list[tuple[int, int, Place | None]] = [(int(position), -1, None) for position in np.flatnonzero(reads)]
    # what comes back at the same moment comes in the order of need
    for place in _in_order_of(Kind.NEEDED, points):
        events += [
            (points.positions[Moment(Kind.SAVED, place)], _COPY, place),
            (points.release[place], _RELEASE, place),
            (points.reload[place], _RELOAD, place),
            (points.positions[Moment(Kind.NEEDED, place)], _NEED, place),
        ]
    return sorted(events, key=itemgetter(0, 1))
