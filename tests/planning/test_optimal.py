"""Small rounds against an exhaustive search, and how long large ones take to plan."""

import itertools
import random
import time

import pytest

from ds_fgoffload.planning.planner import PlanGoal, plan_round
from ds_fgoffload.planning.simulator import Round
from ds_fgoffload.profiling.profile import ProfiledMoment, RoundProfile
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Site

OF_BEST = 1.02


def moment(kind, micro_batch, name=None):
    site = Site("", 0, -1) if name is None else Site(str(name), 0, 0)
    return Moment(kind, Place(micro_batch, site))


def small_round(seed):
    """Up to ten storages in one or two micro-batches, one after the other or interleaved as in a pipeline."""
    draw = random.Random(seed)
    sites, micro_batches = draw.randint(2, 5), draw.choice((1, 2))
    sizes = [draw.choice((1, 2, 4, 8)) * draw.uniform(0.5, 2) * 1e6 for _ in range(sites)]
    took_ms = [draw.uniform(0.5, 4) for _ in range(sites)]
    forward = [[moment(Kind.SAVED, m, n) for n in range(sites)] for m in range(micro_batches)]
    backward = [
        [moment(Kind.BACKWARD, m), *(moment(Kind.NEEDED, m, n) for n in reversed(range(sites)))]
        for m in range(micro_batches)
    ]
    interleaved = draw.random() < 0.5
    order = (
        [*forward, *backward]
        if interleaved
        else [part for pair in zip(forward, backward, strict=True) for part in pair]
    )
    at_ms, held_bytes, other_bytes, work_bytes = 0.0, 0.0, draw.uniform(0, 20) * 1e6, draw.uniform(0, 3) * 1e6
    passed = []
    for each in itertools.chain(*order):
        of = int(each.place.site.unit or 0)
        at_ms += {Kind.SAVED: took_ms[of], Kind.NEEDED: 2 * took_ms[of], Kind.BACKWARD: 0.1}[each.kind]
        saves = each.kind is Kind.SAVED
        held_bytes += sizes[of] if saves else 0
        memory_bytes = int(other_bytes + held_bytes + work_bytes * draw.random())
        passed.append(ProfiledMoment(each, at_ms, int(sizes[of]) if saves else 0, memory_bytes))
        held_bytes -= sizes[of] if each.kind is Kind.NEEDED else 0
    rate = sum(sizes) * micro_batches / at_ms * draw.uniform(0.5, 4)
    return RoundProfile(passed, rate, rate)


def lowest_peak(profile):
    """Of all choices of what is copied."""
    the_round = Round(profile, 1.0)
    numbers = sorted(the_round.candidates)
    choices = itertools.chain(*(itertools.combinations(numbers, count) for count in range(len(numbers) + 1)))
    return min(the_round.simulate(set(choice)).peak_bytes for choice in choices)


def check(seeds):
    lowered = 0
    for seed in seeds:
        profile = small_round(seed)
        best = lowest_peak(profile)
        assert plan_round(profile, PlanGoal()).peak_bytes <= OF_BEST * best, seed
        lowered += best < profile.peak_bytes
    assert lowered > 0.6 * len(seeds)


def test_within_two_per_cent_of_the_best():
    check(range(100))


@pytest.mark.full
def test_within_two_per_cent_of_the_best_a_thousand_times():
    check(range(1000))


def large_round(sites):
    draw = random.Random(0)
    sizes = [draw.uniform(1, 8) * 1e6 for _ in range(sites)]
    passed, at_ms, held_bytes = [], 0.0, 0.0
    for n, size_bytes in enumerate(sizes):
        for kind in (Kind.OPENED, Kind.SAVED, Kind.CLOSED):
            at_ms += 0.1
            held_bytes += size_bytes if kind is Kind.SAVED else 0
            saved_bytes = int(size_bytes) if kind is Kind.SAVED else 0
            passed.append(ProfiledMoment(moment(kind, 0, n), at_ms, saved_bytes, int(held_bytes)))
    for n in reversed(range(sites)):
        at_ms += 0.6
        passed.append(ProfiledMoment(moment(Kind.NEEDED, 0, n), at_ms, 0, int(held_bytes)))
        held_bytes -= sizes[n]
    rate = 2 * sum(sizes) / at_ms
    return RoundProfile(passed, rate, rate)


@pytest.mark.parametrize("max_overhead", [None, 0.02])
def test_ten_thousand_sites_are_planned_in_about_a_second(max_overhead):
    """0.6 and 1.0 s of one core of a machine that does nothing else; here others run beside it."""
    profile = large_round(10_000)
    began = time.process_time()
    forecast = plan_round(profile, PlanGoal(max_overhead=max_overhead))
    assert time.process_time() - began < 4
    assert forecast.peak_bytes < 0.35 * profile.peak_bytes
