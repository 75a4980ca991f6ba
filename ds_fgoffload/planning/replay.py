"""A plan, made for one typical round, tried on the rounds as they may go.

All rounds are replayed at once, a row of an array for each; the link works as in
:mod:`~ds_fgoffload.planning.simulator`.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from ds_fgoffload.planning.step_model import Floats, Scenarios
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Points

_RELOAD, _NEED, _COPY, _RELEASE = range(4)


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
