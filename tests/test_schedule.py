"""The schedule as tables: on the left what happens, on the right what is to be done about it."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ds_fgoffload.plan import Action, Plan, Site
from ds_fgoffload.schedule import Schedule, Verb, _Place


def make(release=None, prefetch=None, kept=(), *, synchronous=False):
    """A schedule; storages named in ``kept`` stay on the device. A storage's site is named like the storage."""
    sites = {Site(name, 0, 0): Action.KEEP for name in kept}
    plan = Plan(sites=sites, release_window_bytes=release, prefetch_window_bytes=prefetch)
    return Schedule(plan, synchronous=synchronous)


def happen(schedule, event):
    """Carries out one line such as ``save a 10 2`` (name, bytes, micro-batch; 1 if left out)."""
    verb, *words = event.split()
    if verb == "save":
        name, size, micro_batch = (*words, "1")[:3]
        return schedule.saved(name, Site(name, 0, 0), int(size), int(micro_batch))
    if verb == "close":
        return schedule.scope_closed(int(words[0]))
    if verb == "begin":
        return schedule.micro_batch_began()
    if verb == "backward":
        return schedule.backward_began(int(words[0]))
    act = {"again": schedule.saved_again, "stays": schedule.stays, "need": schedule.needed, "die": schedule.died}[verb]
    return act(words[0])


def check(schedule, table):
    lines = [line.strip() for line in table.strip().splitlines()]
    events = [line.partition("->")[0].strip() for line in lines]
    found = [
        f"{event} -> {', '.join(f'{verb.value} {key}' for verb, key in happen(schedule, event) or ())}".rstrip()
        for event in events
    ]
    expected = [f"{event} -> {line.partition('->')[2].strip()}".rstrip() for event, line in zip(events, lines, strict=True)]
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
    assert schedule.prefetch_window_bytes == 20


def test_a_device_without_streams_obeys_a_window_that_was_set():
    check(make(release=10, synchronous=True), "save a 10 -> offload a")


def test_automatic_windows():
    schedule = make()
    for events, release, prefetch in [
        (["begin"], 0, 0),
        (["save a 10"], 20, 20),  # two storages
        ([f"save b{n} 10" for n in range(29)], 20, 40),  # a sixth of 300 is 50: the prefetch window may double
        (["close 45"], 45, 50),  # a call saved 45, within a sixth; twice that is not
        (["close 70"], 50, 50),
        (["save c 30"], 60, 60),  # two storages, although a sixth is 55
        (["begin", "save d 30", "close 30"], 60, 60),  # a smaller micro-batch changes nothing
        ([f"save e{n} 30" for n in range(23)], 70, 120),  # a sixth of 720 is 120
        (["close 500"], 120, 120),
    ]:
        for event in events:
            happen(schedule, event)
        assert (schedule.release_window_bytes, schedule.prefetch_window_bytes) == (release, prefetch), events


def test_windows_that_were_set_do_not_move():
    schedule = make(release=7, prefetch=9)
    for event in ("begin", "save a 1000", "close 1000"):
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
        die e      ->
        need d     -> reload b
        die d      ->
        need c     -> reload a
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
        die c      ->
        need b     -> reload b
        die b      ->
        need a     -> reload a
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
        die d     ->
        need b    -> reload c
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


def test_sites_that_the_plan_keeps_do_not_move():
    check(
        make(release=0, prefetch=100, kept="ac"),
        """
        save a 10 ->
        save b 10 -> offload b, release b
        save c 10 ->
        again c   ->
        need c    -> reload b
        need b    ->
        need a    ->
        """,
    )


@pytest.mark.parametrize(
    ("before", "place"),
    [
        ("save k 10", _Place.KEPT),
        ("save a 10", _Place.LEAVING),
        ("save a 10; need a", _Place.IN_PLACE),
        ("save a 10; save b 10", _Place.HOST),
        ("save a 10; save b 10; need a", _Place.RETURNED),
    ],
)
def test_a_storage_may_die_wherever_it_is(before, place):
    schedule = make(release=10, prefetch=0, kept="k")
    for event in before.split("; "):
        happen(schedule, event)
    name = "k" if place is _Place.KEPT else "a"
    assert schedule._entries[name].place is place
    check(
        schedule,
        f"""
        die {name} ->
        save z 10  -> offload z{", release b" if "save b" in before else ""}
        """,
    )
    for other in list(schedule._entries):
        happen(schedule, f"die {other}")
    assert_nothing_is_left(schedule)


def test_micro_batches_come_back_each_in_its_own_turn():
    check(
        make(release=0, prefetch=20),
        """
        begin       ->
        save a1 10 1 -> offload a1, release a1
        save b1 10 1 -> offload b1, release b1
        begin       ->
        save a2 10 2 -> offload a2, release a2
        save b2 10 2 -> offload b2, release b2
        begin       ->
        save a3 10 3 -> offload a3, release a3
        save b3 10 3 -> offload b3, release b3
        backward 1  -> reload b1, reload a1
        need b1     ->
        die b1      ->
        backward 3  -> reload b3
        need a1     ->
        die a1      ->
        need b3     -> reload a3
        die b3      ->
        need a3     ->
        die a3      ->
        backward 2  -> reload b2, reload a2
        """,
    )


# Whatever happens, the books are right.

SIZES = st.integers(1, 50)
WINDOWS = st.none() | st.integers(0, 120)
EVENTS = st.sampled_from(["save", "save", "save", "again", "stays", "need", "need", "die", "die", "close", "begin", "backward"])


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    release=WINDOWS,
    prefetch=WINDOWS,
    synchronous=st.booleans(),
    events=st.lists(st.tuples(EVENTS, SIZES, st.integers(0, 1 << 16)), max_size=60),
)
def test_any_order_of_events_keeps_the_books(release, prefetch, synchronous, events):
    schedule = make(release, prefetch, kept=("3", "7"), synchronous=synchronous)
    alive, on_host = [], set()
    for number, (verb, size, choice) in enumerate(events):
        name = alive[choice % len(alive)] if alive else None
        if verb == "save":
            name = str(number)
            alive.append(name)
            acts = happen(schedule, f"save {name} {size} {choice % 3}")
        elif verb in ("close", "begin", "backward"):
            acts = happen(schedule, f"{verb} {choice % 3}") or ()
        elif name is None:
            continue
        else:
            if verb == "die":
                alive.remove(name)
                on_host.discard(name)
            elif verb == "stays":
                on_host.discard(name)
            acts = happen(schedule, f"{verb} {name}") or ()
        for act, key in acts:
            assert key in alive
            if act is Verb.RELOAD:
                on_host.remove(key)
            elif act is Verb.RELEASE:
                assert key not in on_host
                on_host.add(key)
            else:
                assert key == name
        assert_the_books_are_right(schedule, on_host)
    for name in alive:
        happen(schedule, f"die {name}")
    assert_nothing_is_left(schedule)


def assert_the_books_are_right(schedule, on_host):
    entries = schedule._entries
    bytes_in = {place: sum(e.size_bytes for e in entries.values() if e.place is place) for place in _Place}
    assert schedule._leaving_bytes == bytes_in[_Place.LEAVING] == sum(schedule._leaving.values())
    assert schedule._leaving_bytes <= schedule.release_window_bytes
    assert schedule._backward_bytes == bytes_in[_Place.IN_PLACE] + bytes_in[_Place.RETURNED]
    assert {name for name, entry in entries.items() if entry.place is _Place.HOST} == on_host
    assert all(name in schedule._on_host[entries[name].micro_batch] for name in on_host)


def assert_nothing_is_left(schedule):
    assert not schedule._entries
    assert not schedule._leaving
    assert not schedule._on_host
    assert not schedule._live
    assert schedule._leaving_bytes == schedule._backward_bytes == 0
