"""BlockingReads of the device, as times: begin and end are the moments around, copies and reads end in between."""

import pytest

from ds_fgoffload.profiling.blocking_reads import BlockingReads
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Site

MOMENT = Moment(Kind.OPENED, Place(0, Site("unit", 0, -1)))


@pytest.fixture
def reads():
    return BlockingReads([])


def test_a_read_that_was_over_when_no_copy_was_waited_for_nothing(reads):
    assert reads.seen(MOMENT, 0.0, 5.0, copy_ends_ms=[1.0, 4.9], read_ends_ms=[4.0]) == (0.0, 1.0, False)


def test_how_long_it_waited_is_guessed_until_it_is_seen_without(reads):
    assert reads.seen(MOMENT, 0.0, 5.0, [3.9], [4.0]) == (3.9, 1.0, True)
    assert reads.seen(MOMENT, 0.0, 3.0, [0.5], [2.0]) == (0.0, 1.0, False)
    assert reads.seen(MOMENT, 0.0, 5.0, [3.9], [4.0]) == (2.0, 1.0, False)


def test_a_copy_that_happened_to_end_just_then_kept_nothing_waiting(reads):
    reads.seen(MOMENT, 0.0, 3.0, [], [2.0])
    assert reads.seen(MOMENT, 0.0, 3.1, [2.0], [2.1]) == (0.0, 1.0, False)


def test_any_of_several_reads_may_have_waited(reads):
    reads.seen(MOMENT, 0.0, 3.0, [], [1.0, 2.0])
    assert reads.seen(MOMENT, 0.0, 6.0, [3.95], [4.0, 5.0]) == (3.0, 1.0, False)


def test_where_reads_are_not_watched_their_ends_are_told_from_rounds_in_which_they_were(reads):
    reads.seen(MOMENT, 0.0, 3.0, [], [2.0])
    assert reads.seen(MOMENT, 0.0, 5.0, [3.8]) == (2.0, 1.0, False)
    assert reads.seen(MOMENT, 0.0, 2.5, [0.8]) == (0.0, 1.0, False)
    assert reads.seen(MOMENT, 0.0, 5.0, [3.8]) == (2.5, 1.0, False)


def test_a_round_in_which_all_took_long_does_not_count_once_it_took_less(reads):
    assert reads.seen(MOMENT, 0.0, 300.0, [], [299.5]) == (0.0, 0.5, False)
    assert reads.seen(MOMENT, 0.0, 8.0, [7.4], [7.5]) == (7.4, 0.5, True)
    assert reads.seen(MOMENT, 0.0, 0.8, [], [0.3]) == (0.0, 0.5, False)
    assert reads.seen(MOMENT, 0.0, 8.0, [7.4], [7.5]) == (7.2, 0.5, False)
