"""The schedule as tables: on the left what happens, on the right what is to be done about it."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ds_fgoffload.schedule.order import LONGEST_ROUND
from ds_fgoffload.schedule.plan import Plan, Site, Verb
from ds_fgoffload.schedule.schedule import Schedule, _Where


def make(release=None, prefetch=None, *, synchronous=False):
    schedule = Schedule(Plan(release_window_bytes=release, prefetch_window_bytes=prefetch), synchronous=synchronous)
    schedule.micro_batch_began(1)
    return schedule


def happen(schedule, event):
    """Carries out a line such as ``save a2 10 2``: name, bytes, micro-batch (or 1). a1 and a2 have one site."""
    verb, *words = event.split()
    if verb == "save":
        name, size, micro_batch = (*words, "1")[:3]
        return schedule.saved(name, Site(name.rstrip("0123456789"), 0, 0), int(size), int(micro_batch))
    if verb in ("close", "begin", "backward"):
        number = int(words[0])
        if verb == "close":
            return schedule.scope_closed(1, "unit", 0, number)
        if verb == "begin":
            schedule.micro_batch_began(number)
            return []
        return schedule.backward_began(number)
    act = {"again": schedule.saved_again, "stays": schedule.stays, "need": schedule.needed, "die": schedule.died}[verb]
    return act(words[0]) or []


def check(schedule, table):
    lines = [line.strip() for line in table.strip().splitlines()]
    events = [line.partition("->")[0].strip() for line in lines]
    found = [f"{e} -> {', '.join(f'{verb.value} {key}' for verb, key in happen(schedule, e))}".rstrip() for e in events]
    expected = [
        f"{event} -> {line.partition('->')[2].strip()}".rstrip() for event, line in zip(events, lines, strict=True)
    ]
    assert found == expected


def test_the_oldest_leaves_when_the_window_is_exceeded():
    check(
        make(release=20),
        """
        save a 10 -> offload a
        save b 10 -> offload b
        save c 10 -> offload c, release a
        save d 25 -> offload d, release b, release c, release d
        save e 20 -> offload e
        """,
    )


def test_a_window_of_zero_releases_at_once():
    check(make(release=0), "save a 1 -> offload a, release a")


@pytest.mark.parametrize(("synchronous", "window"), [(True, 0), (False, 20)])
def test_a_device_without_streams_has_no_automatic_release_window(synchronous, window):
    schedule = make(synchronous=synchronous)
    happen(schedule, "save a 10")
    assert schedule.release_window_bytes == window
    assert schedule.prefetch_window_bytes == 40


def test_a_device_without_streams_obeys_a_window_that_was_set():
    check(make(release=10, synchronous=True), "save a 10 -> offload a")


def test_automatic_windows():
    schedule = make()
    for events, release, prefetch in [
        (["save a 10"], 20, 40),  # two of the largest parcel
        ([f"save b{n} 10" for n in range(31)], 20, 40),
        (["close 30"], 30, 60),  # what a call saved, within an eighth of 320
        (["close 70"], 40, 80),
        (["save c 30"], 60, 120),  # two of the largest parcel, although an eighth is 43
        ([f"save d{n} 21" for n in range(10)], 70, 140),  # an eighth of 560
        ([f"die b{n}" for n in range(31)], 70, 140),  # what was once alive counts
        ([f"save e{n} 20" for n in range(15)], 70, 140),
        (["close 90"], 70, 140),
        (["save f 20"], 71, 142),  # an eighth of 570
    ]:
        for event in events:
            happen(schedule, event)
        assert (schedule.release_window_bytes, schedule.prefetch_window_bytes) == (release, prefetch), events


def test_a_reload_that_was_late_for_want_of_room_makes_room():
    schedule = make(release=0)
    check(
        schedule,
        """
        save a 20  -> offload a, release a
        save b 20  -> offload b, release b
        save c 20  -> offload c, release c
        save d 20  -> offload d, release d
        save e 20  -> offload e, release e
        save f 20  -> offload f, release f
        backward 1 -> reload f, reload e, reload d, reload c
        need f     ->
        need b     -> reload b
        """,
    )
    # Four were on the device when b was needed next, and there was no room for it beside them.
    assert schedule.prefetch_window_bytes == 100


def test_windows_that_were_set_do_not_move():
    schedule = make(release=7, prefetch=9)
    for event in ("save a 1000", "close 1000"):
        happen(schedule, event)
    assert (schedule.release_window_bytes, schedule.prefetch_window_bytes) == (7, 9)


def test_what_was_saved_last_is_used_in_place_and_the_rest_comes_back_in_time():
    check(
        make(release=20, prefetch=30),
        """
        save a 10  -> offload a
        save b 10  -> offload b
        save c 10  -> offload c, release a
        save d 10  -> offload d, release b
        save e 10  -> offload e, release c
        backward 1 ->
        need e     -> reload c
        die e      -> reload b
        need d     ->
        die d      -> reload a
        need c     ->
        die c      ->
        need b     ->
        die b      ->
        need a     ->
        die a      ->
        """,
    )


def test_backward_brings_back_what_it_needs_first_if_nothing_of_it_is_left():
    check(
        make(release=10, prefetch=30),
        """
        save a 10 1 -> offload a
        save b 10 1 -> offload b, release a
        save c 10 2 -> offload c, release b
        backward 2  ->
        backward 1  -> reload b, reload a
        backward 3  ->
        """,
    )


def test_no_more_comes_back_than_the_window_holds():
    check(
        make(release=0, prefetch=25),
        """
        save a 10  -> offload a, release a
        save b 20  -> offload b, release b
        save c 10  -> offload c, release c
        save d 15  -> offload d, release d
        backward 1 -> reload d, reload c
        need d     ->
        die d      ->
        need c     ->
        die c      -> reload b
        need b     ->
        die b      -> reload a
        need a     ->
        """,
    )


def test_without_a_prefetch_window_everything_comes_back_when_needed():
    check(
        make(release=0, prefetch=0),
        """
        save a 10 -> offload a, release a
        save b 10 -> offload b, release b
        need b    -> reload b
        need b    ->
        die b     ->
        need a    -> reload a
        """,
    )


def test_a_storage_that_is_needed_before_its_turn_comes_first_and_beyond_the_window():
    check(
        make(release=0, prefetch=20),
        """
        save a 10 -> offload a, release a
        save b 10 -> offload b, release b
        save c 10 -> offload c, release c
        save d 90 -> offload d, release d
        need a    -> reload a
        die a     ->
        need d    -> reload d
        need b    -> reload b
        die d     -> reload c
        need b    ->
        """,
    )


def test_a_storage_that_is_needed_while_it_leaves_stays():
    check(
        make(release=20, prefetch=0),
        """
        save a 10 -> offload a
        save b 10 -> offload b
        need a    ->
        save c 10 -> offload c
        save d 10 -> offload d, release b
        need a    ->
        save e 10 -> offload e, release c
        """,
    )


def test_a_storage_that_is_saved_again_leaves_later_and_comes_back_earlier():
    check(
        make(release=20, prefetch=10),
        """
        save a 10  -> offload a
        save b 10  -> offload b
        again a    ->
        save c 10  -> offload c, release b
        save d 10  -> offload d, release a
        save e 10  -> offload e, release c
        again b    ->
        die e      ->
        die d      ->
        backward 1 -> reload b
        die b      ->
        need c     -> reload c
        """,
    )


def test_a_storage_that_finds_no_room_is_in_no_window():
    check(
        make(release=10, prefetch=100),
        """
        save a 10 -> offload a
        stays a   ->
        save b 10 -> offload b
        save c 10 -> offload c, release b
        stays b   ->
        again b   ->
        need c    ->
        need b    ->
        need a    ->
        """,
    )


@pytest.mark.parametrize(
    ("before", "where"),
    [
        ("save a 10; stays a", _Where.KEPT),
        ("save a 10", _Where.LEAVING),
        ("save a 10; need a", _Where.IN_PLACE),
        ("save a 10; save b 10", _Where.HOST),
        ("save a 10; save b 10; need a", _Where.RETURNED),
    ],
)
def test_a_parcel_may_die_wherever_it_is(before, where):
    schedule = make(release=10, prefetch=0)
    for event in before.split("; "):
        happen(schedule, event)
    assert schedule._entries["a"].where is where
    check(
        schedule,
        f"""
        die a     ->
        save z 10 -> offload z{", release b" if "save b" in before else ""}
        """,
    )
    for name in list(schedule._entries):
        happen(schedule, f"die {name}")
    assert_nothing_is_left(schedule)


def test_micro_batches_come_back_each_in_its_own_turn():
    check(
        make(release=0, prefetch=20),
        """
        save a1 10 1 -> offload a1, release a1
        save b1 10 1 -> offload b1, release b1
        begin 2      ->
        save a2 10 2 -> offload a2, release a2
        save b2 10 2 -> offload b2, release b2
        begin 3      ->
        save a3 10 3 -> offload a3, release a3
        save b3 10 3 -> offload b3, release b3
        backward 1   -> reload b1, reload a1
        need b1      ->
        die b1       ->
        backward 3   -> reload b3
        need a1      ->
        die a1       ->
        need b3      -> reload a3
        die b3       ->
        need a3      ->
        die a3       ->
        backward 2   -> reload b2, reload a2
        """,
    )


def test_what_others_saved_last_makes_room_for_what_backward_brings_in():
    check(
        make(release=30, prefetch=40),
        """
        save a1 10 1 -> offload a1
        save b1 10 1 -> offload b1
        begin 2      ->
        save a2 10 2 -> offload a2
        save b2 10 2 -> offload b2, release a1
        save c2 10 2 -> offload c2, release b1
        backward 1   -> reload b1
        need b1      -> release a2, reload a1
        die b1       ->
        need a1      -> release b2
        """,
    )


def test_the_order_of_one_round_is_expected_in_the_next():
    check(
        make(release=0, prefetch=20),
        """
        save a1 10 1 -> offload a1, release a1
        save b1 10 1 -> offload b1, release b1
        save c1 10 1 -> offload c1, release c1
        save d1 10 1 -> offload d1, release d1
        backward 1   -> reload d1, reload c1
        need b1      -> reload b1
        die b1       ->
        need d1      ->
        die d1       -> reload a1
        need a1      ->
        need c1      ->
        die a1       ->
        die c1       ->
        begin 2      ->
        save a2 10 2 -> offload a2, release a2
        save b2 10 2 -> offload b2, release b2
        save c2 10 2 -> offload c2, release c2
        save d2 10 2 -> offload d2, release d2
        backward 2   -> reload b2, reload d2
        need b2      ->
        die b2       -> reload a2
        need d2      ->
        die d2       -> reload c2
        need a2      ->
        need c2      ->
        """,
    )


def test_backward_that_goes_another_way_than_the_last_is_followed():
    check(
        make(release=0, prefetch=10),
        """
        save a1 10 1 -> offload a1, release a1
        save b1 10 1 -> offload b1, release b1
        save c1 10 1 -> offload c1, release c1
        save d1 10 1 -> offload d1, release d1
        backward 1   -> reload d1
        need d1      ->
        die d1       -> reload c1
        need a1      -> reload a1
        need c1      ->
        need b1      -> reload b1
        die a1       ->
        die b1       ->
        die c1       ->
        begin 2      ->
        save a2 10 2 -> offload a2, release a2
        save b2 10 2 -> offload b2, release b2
        save c2 10 2 -> offload c2, release c2
        save d2 10 2 -> offload d2, release d2
        save x2 10 2 -> offload x2, release x2
        backward 2   -> reload d2
        need c2      -> reload c2
        die c2       ->
        need d2      ->
        die d2       -> reload b2
        need b2      ->
        die b2       -> reload x2
        need x2      ->
        die x2       -> reload a2
        """,
    )


def test_the_micro_batches_of_a_round_are_told_apart():
    # Two in flight, backward in the order of forward: in the next round the second comes after the first.
    check(
        make(release=0, prefetch=20),
        """
        save a1 20 1 -> offload a1, release a1
        begin 2      ->
        save a2 20 2 -> offload a2, release a2
        backward 1   -> reload a1
        need a1      ->
        die a1       ->
        backward 2   -> reload a2
        need a2      ->
        die a2       ->
        begin 3      ->
        save a3 20 3 -> offload a3, release a3
        begin 4      ->
        save a4 20 4 -> offload a4, release a4
        backward 3   -> reload a3
        need a3      ->
        die a3       -> reload a4
        """,
    )


def test_a_graph_that_someone_keeps_does_not_keep_a_round_open():
    schedule = make(release=0, prefetch=0)
    happen(schedule, "save kept 10 1")
    for number in range(2, LONGEST_ROUND + 10):
        for event in (
            f"begin {number}",
            f"save a{number} 1 {number}",
            f"backward {number}",
            f"need a{number}",
            f"die a{number}",
        ):
            happen(schedule, event)
    assert len(schedule._order._ordinals) < LONGEST_ROUND


# Whatever happens, the books are right.

WINDOWS = st.none() | st.integers(0, 120)
EVENTS = ["save", "save", "save", "again", "stays", "need", "need", "die", "die", "close", "begin", "backward"]


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    release=WINDOWS,
    prefetch=WINDOWS,
    synchronous=st.booleans(),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 50), st.integers(0, 1 << 16)), max_size=70),
)
def test_any_order_of_events_keeps_the_books(release, prefetch, synchronous, events):  # noqa: C901, PLR0912
    schedule = make(release, prefetch, synchronous=synchronous)
    micro_batch, alive, on_host = 1, [], set()
    for number, (verb, size, choice) in enumerate(events):
        key = alive[choice % len(alive)] if alive else None
        if verb == "begin":
            micro_batch += 1
            acts = happen(schedule, f"begin {micro_batch}")
        elif verb == "save":
            key = number
            alive.append(key)
            acts = schedule.saved(key, Site("unit", choice % 3, number), size, max(1, micro_batch - choice % 2))
        elif verb == "close":
            acts = happen(schedule, f"close {size}")
        elif verb == "backward":
            acts = schedule.backward_began(1 + choice % micro_batch)
        elif key is None:
            continue
        elif verb == "need":
            acts = schedule.needed(key)
        else:
            if verb == "die":
                alive.remove(key)
            on_host -= {key} if verb in ("die", "stays") else set()
            acts = {"die": schedule.died, "stays": schedule.stays, "again": schedule.saved_again}[verb](key) or []
        for act, acted_on in acts:
            assert acted_on in alive
            if act is Verb.RELOAD:
                on_host.remove(acted_on)
            elif act is Verb.RELEASE:
                assert acted_on not in on_host
                on_host.add(acted_on)
            else:
                assert acted_on == key
        assert_the_books_are_right(schedule, on_host)
    for key in alive:
        schedule.died(key)
    assert_nothing_is_left(schedule)


def assert_the_books_are_right(schedule, on_host):
    entries = schedule._entries
    bytes_in = {where: sum(e.size_bytes for e in entries.values() if e.where is where) for where in _Where}
    assert schedule._leaving_bytes == bytes_in[_Where.LEAVING] == sum(schedule._leaving.values())
    assert schedule._leaving_bytes <= schedule.release_window_bytes
    assert schedule._backward_bytes == bytes_in[_Where.IN_PLACE] + bytes_in[_Where.RETURNED]
    assert schedule._alive_bytes == sum(bytes_in.values())
    assert schedule._host_bytes == bytes_in[_Where.HOST]
    assert {key for key, entry in entries.items() if entry.where is _Where.HOST} == on_host
    assert set(schedule._order._on_host.values()) == on_host
    assert set(schedule._order._alive) == {entry.micro_batch for entry in entries.values()}
    assert schedule._order._in_backward <= set(schedule._order._alive)


def assert_nothing_is_left(schedule):
    order = schedule._order
    assert not any(
        [schedule._entries, schedule._leaving, order._on_host, order._stacks, order._alive, order._in_backward]
    )
    assert schedule._leaving_bytes == schedule._backward_bytes == schedule._alive_bytes == 0
