"""Rounds that differ from the one that was planned for: releases and reloads follow from what has come."""

from dataclasses import replace

import pytest

from ds_fgoffload.schedule.clock import Clock
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Plan, Points, Site, Timetable
from ds_fgoffload.schedule.schedule import Schedule
from tests.schedule.test_schedule import check

NAMES = "abcdef"
SIZE_BYTES = 100


def place(name):
    return Place(0, Site(name, 0, 0))


def moments(names):
    yield from (Moment(Kind.SAVED, place(name)) for name in names)
    yield Moment(Kind.BACKWARD, Place(0, Site("", 0, -1)))
    yield from (Moment(Kind.NEEDED, place(name)) for name in reversed(names))


POSITIONS = {moment: position for position, moment in enumerate(moments(NAMES))}
# a is saved at 10 ms, b at 20 and so on; backward begins at 60; f is needed at once, e at 70, a at 110
STRETCHES_MS = [10.0] * len(NAMES) + [0.0, 0.0] + [10.0] * (len(NAMES) - 1)
TIMES = Timetable(
    STRETCHES_MS,
    {place(name): SIZE_BYTES for name in NAMES},
    d2h_bytes_per_ms=10.0,
    h2d_bytes_per_ms=10.0,
    spare_ms=1.0,
)


def saved(name):
    return POSITIONS[Moment(Kind.SAVED, place(name))]


def needed(name):
    return POSITIONS[Moment(Kind.NEEDED, place(name))]


# As it is planned: a's copy, from 10 to 20 ms, is over when c is saved; b's, from 20 to 30, when d is.
POINTS = Points(
    POSITIONS,
    release={place("a"): saved("c"), place("b"): saved("d")},
    reload={place("a"): needed("c"), place("b"): needed("d")},
    moved=frozenset({place("a"), place("b")}),
    times=TIMES,
)


def schedule_of(points=POINTS, **times):
    schedule = Schedule(Plan(), synchronous=False)
    schedule.follow(replace(points, times=replace(points.times, **times)))
    schedule.micro_batch_began(1)
    return schedule


AS_PLANNED = """
    save a 100 -> offload a
    save b 100 -> offload b
    save c 100 -> release a
    save d 100 -> release b
    save e 100 ->
    save f 100 ->
    backward 1 ->
    need f     ->
    need e     ->
    need d     -> reload b
    need c     -> reload a
    need b     ->
    need a     ->
"""


def test_a_round_that_goes_as_planned():
    check(schedule_of(), AS_PLANNED)
    fixed = Schedule(Plan(), synchronous=False)
    fixed.follow(replace(POINTS, times=None))
    fixed.micro_batch_began(1)
    check(fixed, AS_PLANNED)


def test_what_does_not_come_takes_no_time():
    """Without c there is no time for a's copy before d, and in backward none for b's between d and b."""
    check(
        schedule_of(),
        """
        save a 100 -> offload a
        save b 100 -> offload b
        save d 100 -> release a
        save e 100 -> release b
        save f 100 ->
        backward 1 ->
        need f     ->
        need e     -> reload b
        need d     -> reload a
        need b     ->
        need a     ->
        """,
    )


def test_what_saves_more_is_longer_under_way():
    check(
        schedule_of(with_bytes=0.0),
        """
        save a 250 -> offload a
        save b 100 -> offload b
        save c 100 ->
        save d 100 -> release a
        save e 100 -> release b
        save f 100 ->
        backward 1 ->
        need f     ->
        need e     -> reload b
        need d     -> reload a
        need c     ->
        need b     ->
        need a     ->
        """,
    )


@pytest.mark.parametrize(("with_bytes", "released_at"), [(0.0, "c"), (1.0, "d")])
def test_what_saves_less_takes_less_time_as_far_as_that_was_seen(with_bytes, released_at):
    """If c takes 2 ms instead of 10, 12 ms are too few for a's copy."""
    schedule = schedule_of(with_bytes=with_bytes, d2h_bytes_per_ms=8.0)
    schedule.saved("a", Site("a", 0, 0), 100, 1)
    schedule.saved("b", Site("b", 0, 0), 100, 1)
    acts = {name: schedule.saved(name, Site(name, 0, 0), 20, 1) for name in "cde"}
    assert next(name for name in acts if any(act.key == "a" for act in acts[name])) == released_at


def test_compute_waits_for_no_longer_than_is_allowed():
    """Both are to leave before their copies are over, which costs 5 ms; there are 7."""
    early = replace(POINTS, release={place("a"): saved("b"), place("b"): saved("c")})
    check(
        schedule_of(early, allowed_ms=7.0, d2h_bytes_per_ms=100 / 15),
        """
        save a 100 -> offload a
        save b 100 -> release a, offload b
        save c 100 ->
        save d 100 -> release b
        """,
    )
    check(
        schedule_of(early, allowed_ms=4.0, d2h_bytes_per_ms=100 / 15),
        """
        save a 100 -> offload a
        save b 100 -> offload b
        save c 100 -> release a
        save d 100 -> release b
        """,
    )


def test_what_would_come_back_before_it_has_left_stays():
    check(
        schedule_of(d2h_bytes_per_ms=1.0),
        """
        save a 100 -> offload a
        save b 100 -> offload b
        save c 100 ->
        save d 100 ->
        save e 100 ->
        save f 100 ->
        backward 1 ->
        need f     ->
        need e     ->
        need d     ->
        need c     ->
        need b     ->
        need a     ->
        """,
    )


def test_what_nobody_foresaw_stays_and_passes():
    check(
        schedule_of(),
        """
        save a 100 -> offload a
        save x 100 ->
        save b 100 -> offload b
        save c 100 -> release a
        save d 100 -> release b
        backward 1 ->
        need x     ->
        need d     -> reload b
        need c     -> reload a
        need b     ->
        need a     ->
        """,
    )


def test_the_next_round_begins_at_nought():
    schedule = schedule_of()
    check(schedule, AS_PLANNED)
    for name in NAMES:
        schedule.died(name)
    schedule.micro_batch_began(2)
    check(schedule, AS_PLANNED.replace(" 100 ", " 100 2 ").replace("backward 1", "backward 2"))


def test_where_nothing_was_foreseen_bytes_tell_nothing():
    times = replace(TIMES, saved_bytes={}, with_bytes=1.0)
    clock = Clock()
    clock.passed(times, 0, Moment(Kind.SAVED, place("a")), 5)
    assert clock.copied(times, 0) == 10.0
