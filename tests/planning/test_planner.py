"""Rounds written down as tables, and what is planned for them. The link carries 10 bytes a millisecond."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ds_fgoffload.planning import simulator as simulation
from ds_fgoffload.planning.planner import PlanGoal, plan_round
from ds_fgoffload.profiling.profile import ProfiledMoment, RoundProfile
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Site

FREE = PlanGoal(max_overhead=0.0)


@pytest.fixture(autouse=True)
def _no_spare_time(monkeypatch):
    monkeypatch.setattr(simulation, "SPARE_TIME_MS", 0.0)


def place(name):
    return Place(0, Site(name, 0, 0))


def recording(*lines, held=(), link=10.0):
    """Lines such as ``save a 10 @3`` or ``need a @9 read 8.5``. All that is saved is alive until it is needed."""
    passed, alive_bytes, sizes = [], 0, {}
    for line in lines:
        words = line.split()
        verb, name = words[:2]
        at_ms = float(next(word for word in words if word.startswith("@"))[1:])
        read_at_ms = float(words[-1]) if "read" in words else None
        size_bytes = int(words[2]) if verb == "save" else 0
        kind = {"save": Kind.SAVED, "need": Kind.NEEDED, "open": Kind.OPENED}[verb]
        passed.append(ProfiledMoment(Moment(kind, place(name)), at_ms, size_bytes, alive_bytes, read_at_ms))
        sizes[name] = sizes.get(name, 0) + size_bytes
        alive_bytes += size_bytes - (sizes[name] if verb == "need" else 0)
    return RoundProfile(passed, link, link, frozenset(map(place, held)))


def plan(rec, goal=FREE, **more):
    """Names with the positions at which they leave and come back, and what is kept."""
    forecast = plan_round(rec, goal, **more)
    points = forecast.points
    gone = {p.site.unit: (points.release[p], points.reload[p]) for p in points.release}
    return gone, sorted(p.site.unit for p in kept(points)), forecast


def kept(points):
    """Places that are saved and not moved."""
    saved = {moment.place for moment in points.positions if moment.kind is Kind.SAVED}
    return frozenset() if points.moved is None else saved - points.moved


FOUR = ("save a 10 @0", "save b 10 @1", "save c 10 @2", "save d 10 @3", "open x @4",
        "need d @5", "need c @7", "need b @9", "need a @11")  # fmt: skip


def test_what_is_copied_leaves_at_the_first_moment_after_its_copy_and_comes_back_at_the_last_in_time():
    gone, kept, forecast = plan(recording(*FOUR))
    # b: copied from 1 to 2, needed at 9: its copy back may begin at 8, and the last moment before that is @7
    assert gone == {"a": (1, 7), "b": (2, 6), "c": (3, 5)}
    # d's copy ends at @4, but would have to begin again at @4
    assert kept == ["d"]
    assert (forecast.peak_bytes, forecast.stalled_ms, forecast.copied_bytes) == (10, 0, 30)


def test_copies_wait_for_each_other():
    gone, _, _ = plan(recording(*FOUR, link=5.0), PlanGoal(everything=True))
    # a is copied until @2, b until @4, c until @6
    assert (gone["a"][0], gone["b"][0]) == (2, 4)


def test_no_more_is_copied_than_lowers_the_peak():
    gone, kept, forecast = plan(recording(*FOUR, link=5.0))
    # a is away from @2, b could be from @4: then c and d are on the device all the same
    assert (list(gone), kept, forecast.peak_bytes) == (["a"], ["b", "c", "d"], 30)


def test_what_would_leave_after_the_peak_is_not_copied():
    gone, kept, _ = plan(recording("save a 10 @0", "save b 40 @1", "open x @2", "need b @3", "need a @20"))
    # b takes 4 ms, and is needed after 2
    assert (gone, kept) == ({"a": (1, 3)}, ["b"])


def test_what_something_else_keeps_is_not_copied():
    _, kept, _ = plan(recording(*FOUR, held=["b"]))
    assert kept == ["b", "d"]


def test_what_backward_never_needed_is_not_copied():
    gone, kept, _ = plan(recording(*FOUR[:2], "save never 5 @1.5", *FOUR[2:]))
    assert "never" in kept
    assert "a" in gone


def test_time_buys_the_release_of_what_is_still_being_copied():
    slow = recording(*FOUR, link=2.5)
    free, bought = plan(slow)[2], plan(slow, PlanGoal(max_overhead=0.4))[2]
    assert bought.peak_bytes < free.peak_bytes
    assert 0 < bought.stalled_ms <= 0.4 * 11


def test_a_target_takes_the_first_saved_and_no_more():
    gone, kept, forecast = plan(recording(*FOUR), PlanGoal(target_saved_bytes=10))
    assert (list(gone), kept, forecast.peak_bytes) == (["a"], ["b", "c", "d"], 30)


@pytest.mark.parametrize(("overhead", "peak_bytes"), [(None, 20), (0.0, 30), (1.0, 20)])
def test_a_target_stays_within_an_overhead_that_was_given(overhead, peak_bytes):
    slow = recording(*FOUR, link=4.0)
    forecast = plan(slow, PlanGoal(target_saved_bytes=20, max_overhead=overhead))[2]
    assert forecast.peak_bytes == peak_bytes


def test_room_is_made_whatever_it_costs():
    slow = recording(*FOUR[:4], "open x @4", "need d @10", "need c @16", "need b @22", "need a @28", link=2.5)
    forecast = plan(slow, PlanGoal(max_overhead=0.0, room_bytes=25))[2]
    assert forecast.peak_bytes <= 25
    assert forecast.stalled_ms > 0


def test_everything_is_copied_and_the_window_holds():
    _, kept, forecast = plan(recording(*FOUR), PlanGoal(everything=True))
    assert (kept, forecast.copied_bytes, forecast.points.within_window) == ([], 40, True)
    assert forecast.points.reload.keys() == set(map(place, "abcd"))


def test_a_copy_that_would_delay_a_read_is_not_made():
    lines = list(FOUR)
    lines[2] = "save c 10 @2 read 1.5"
    gone, kept, _ = plan(recording(*lines))
    # b is copied from 1 to 2, and the host goes on at 1.5
    assert kept == ["b", "d"]
    assert "a" in gone


def test_caution_takes_the_link_to_be_slower():
    assert plan(recording(*FOUR), caution=2.0)[0] == plan(recording(*FOUR, link=5.0))[0]


SAVES = st.lists(st.tuples(st.integers(1, 60), st.floats(0, 5), st.booleans()), min_size=1, max_size=12)


@hypothesis_settings(max_examples=200, deadline=None)
@given(saves=SAVES, link=st.floats(0.5, 50), overhead=st.floats(0, 0.5), data=st.data())
def test_any_round_is_planned_within_what_is_allowed(saves, link, overhead, data):
    order = data.draw(st.permutations(range(len(saves))))
    lines, now_ms = [], 0.0
    for number, (size_bytes, ms, reads) in enumerate(saves):
        lines.append(f"save s{number} {size_bytes} @{now_ms}" + (f" read {now_ms}" if reads else ""))
        now_ms += ms
    for number in order:
        now_ms += saves[number][1]
        lines.append(f"need s{number} @{now_ms}")
    rec = recording(*lines, link=link)
    forecast = plan(rec, PlanGoal(max_overhead=overhead))[2]
    points = forecast.points
    assert forecast.stalled_ms <= overhead * rec.length_ms + 1e-6
    assert forecast.peak_bytes <= rec.peak_bytes
    for gone in points.release:
        assert gone in points.moved
        saved, needed = (points.positions[Moment(kind, gone)] for kind in (Kind.SAVED, Kind.NEEDED))
        assert saved <= points.release[gone] < points.reload[gone] <= needed
    again = plan(dataclasses.replace(rec, held=kept(points)), PlanGoal(max_overhead=overhead))[2]
    assert again.peak_bytes <= forecast.peak_bytes
