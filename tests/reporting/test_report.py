"""The report, out of literal counts: its columns, its sums, and what it says below the table."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from ds_fgoffload.host_memory.pool import HostPoolStats
from ds_fgoffload.reporting.report import RankCounts, render
from ds_fgoffload.stats import OffloadStats, Planned, ReadDelay, RoundStats, UnitStats, shown, total
from ds_fgoffload.text.sizes import human

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POOL = HostPoolStats(
    pinned_bytes=16 * MIB,
    leased_bytes=2 * MIB,
    peak_leased_bytes=12 * MIB,
    requested_bytes=2 * MIB,
    limit_bytes=4 * GIB,
    allocations=1,
    hits=9,
    refused_allocations=0,
)
BUSY = UnitStats(
    calls=6,
    saved_bytes=10 * MIB,
    offloaded_bytes=7 * MIB,
    kept_bytes=3 * MIB,
    reloaded_bytes=4 * MIB,
    used_in_place_bytes=2 * MIB,
    held_bytes=1 * MIB,
    late_reloads=5,
    skipped=Counter(parameter=12, host_full=3),
)
SMALL = UnitStats(calls=2, skipped=Counter(too_small=4, parameter=1))
BARE = UnitStats(calls=2)
HELD = UnitStats(calls=2, saved_bytes=2 * MIB, offloaded_bytes=2 * MIB, held_bytes=2 * MIB)
HALF_HELD = UnitStats(calls=2, saved_bytes=2 * MIB, offloaded_bytes=2 * MIB, held_bytes=MIB, reloaded_bytes=MIB)
KEPT = UnitStats(calls=2, saved_bytes=2 * MIB, kept_bytes=2 * MIB, skipped=Counter(host_full=2))

LOWER_IT = "; storages below min_tensor_bytes stay: lower it"


def counts(rank: int = 0, live_host_bytes: int = 0, **units: UnitStats) -> RankCounts:
    stats = total(units, live_host_bytes)
    stats.peak_host_bytes = 5 * MIB
    return RankCounts(rank, stats, POOL)


def table(text: str) -> list[list[str]]:
    """The cells, row by row, the header first."""
    rows = [line for line in text.splitlines() if line.startswith(("┃", "│"))]
    return [[cell.strip() for cell in row.strip("┃│").replace("┃", "│").split("│")] for row in rows]


def remarks(text: str) -> list[str]:
    return text[text.rindex("┘") + 1 :].split("\n")[1:-1]


def test_a_row_for_each_rank_and_unit_and_the_sums_of_each_rank() -> None:
    text = render([counts(0, a=BUSY, b=HALF_HELD), counts(1, a=SMALL, b=BUSY)], expand=True)
    assert text.splitlines()[0].strip() == "fine_grained_offload: bytes since attaching"
    assert table(text) == [
        ["rank", "unit", "calls", "saved", "offloaded", "reloaded", "in place", "held", "kept", "late"],
        ["0", "a", "6", "10.0 MiB", "7.0 MiB", "4.0 MiB", "2.0 MiB", "1.0 MiB", "3.0 MiB", "5"],
        ["0", "b", "2", "2.0 MiB", "2.0 MiB", "1.0 MiB", "-", "1.0 MiB", "-", "-"],
        ["0", "all units", "", "12.0 MiB", "9.0 MiB", "5.0 MiB", "2.0 MiB", "2.0 MiB", "3.0 MiB", "5"],
        ["1", "a", "2", "-", "-", "-", "-", "-", "-", "-"],
        ["1", "b", "6", "10.0 MiB", "7.0 MiB", "4.0 MiB", "2.0 MiB", "1.0 MiB", "3.0 MiB", "5"],
        ["1", "all units", "", "10.0 MiB", "7.0 MiB", "4.0 MiB", "2.0 MiB", "1.0 MiB", "3.0 MiB", "5"],
    ]


def test_what_was_recomputed_has_a_column_where_there_is_any() -> None:
    made = UnitStats(calls=3, recompute=True, recomputed_bytes=2 * MIB, recomputations=3, recompute_ms=4.4)
    text = render([counts(0, a=made, b=BUSY)])
    assert table(text)[0][-3:] == ["kept", "recomputed", "late"]
    assert [row[-2] for row in table(text)[1:]] == ["2.0 MiB", "-", "2.0 MiB"]
    assert "rank 0: 3 calls recomputed in backward, 4 ms on the device" in remarks(text)


def test_a_unit_that_was_not_recomputed_is_named() -> None:
    text = render([counts(0, a=UnitStats(calls=1, recompute=True), b=UnitStats(recompute_refused="it draws lots"))])
    assert remarks(text)[1:3] == [
        "unit a was never recomputed: somebody else (a checkpoint, say) takes what it saves, it lies in another unit "
        "under recompute, or backward needs nothing that it gives",
        "unit b is not recomputed: it draws lots",
    ]


LAYERS = {f"layers.{n}.mlp": BUSY for n in range(3)}


def test_a_row_for_what_repeats_from_layer_to_layer_and_from_rank_to_rank() -> None:
    text = render([counts(rank, **LAYERS, **{"head": HALF_HELD} if rank else {}) for rank in range(3)])
    assert table(text) == [
        ["rank", "unit", "calls", "saved", "offloaded", "reloaded", "in place", "held", "kept", "late"],
        ["0-2", "layers.{0..2}.mlp", "54", "90.0 MiB", "63.0 MiB", "36.0 MiB", "18.0 MiB", "9.0 MiB", "27.0 MiB", "45"],
        ["1,2", "head", "4", "4.0 MiB", "4.0 MiB", "2.0 MiB", "-", "2.0 MiB", "-", "-"],
        ["0", "all units", "", "30.0 MiB", "21.0 MiB", "12.0 MiB", "6.0 MiB", "3.0 MiB", "9.0 MiB", "15"],
        ["1", "all units", "", "32.0 MiB", "23.0 MiB", "13.0 MiB", "6.0 MiB", "4.0 MiB", "9.0 MiB", "15"],
        ["2", "all units", "", "32.0 MiB", "23.0 MiB", "13.0 MiB", "6.0 MiB", "4.0 MiB", "9.0 MiB", "15"],
    ]


def test_units_with_the_same_fault_share_a_line() -> None:
    units = {**dict.fromkeys([f"layers.{n}.act" for n in range(32)], BARE), "head": BARE, "norm": SMALL}
    said = [line for line in remarks(render([counts(0, **units)])) if line.startswith("unit")]
    assert said == [
        "units layers.{0..31}.act, head saved nothing that may be offloaded "
        "(nothing in them saves tensors for backward)",
        "unit norm saved nothing that may be offloaded (too_small 4, parameter 1)" + LOWER_IT,
    ]


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        (UnitStats(), "saved nothing: they were never called with gradients enabled, or only by compiled code"),
        (
            UnitStats(recomputed_calls=1),
            "saved nothing: they were only called in reentrant checkpoints "
            "(use_reentrant=False offloads instead of recomputing)",
        ),
        (UnitStats(compiled=True), "saved nothing: they lie in a module that torch.compile has compiled"),
        (UnitStats(recompute_refused="lots are drawn"), "are not recomputed: lots are drawn"),
        (
            UnitStats(calls=1, recompute=True),
            "were never recomputed: somebody else (a checkpoint, say) takes what they save, they lie in other units "
            "under recompute, or backward needs nothing that they give",
        ),
    ],
)
def test_of_several_units_is_spoken_in_the_plural(stats: UnitStats, said: str) -> None:
    text = render([counts(0, a=stats, b=stats)])
    assert f"units a, b {said}" in remarks(text)


def test_checkpoints_that_no_hook_sees_keep_the_inputs_of_several_units() -> None:
    unseen = replace(BUSY, unseen_checkpoints=1)
    text = render([counts(0, a=unseen, b=unseen)])
    assert "units a, b: deepspeed.checkpointing keeps their inputs where no hook sees them" in text


def test_what_is_said_of_a_rank() -> None:
    text = render([counts(0, live_host_bytes=3 * KIB, a=BUSY), counts(7, a=HALF_HELD)])
    assert remarks(text) == [
        "rank 0: host pool 16.0 MiB pinned, peak 5.0 MiB leased, limit 4.0 GiB; 3.0 KiB on the host now",
        "rank 0: saved tensors left on the device, by reason: host_full 3, parameter 12",
        "rank 7: host pool 16.0 MiB pinned, peak 5.0 MiB leased, limit 4.0 GiB; 0 B on the host now",
    ]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([UnitStats()], "unit x saved nothing: it was never called with gradients enabled, or only by compiled code"),
        ([UnitStats(compiled=True)], "unit x saved nothing: it lies in a module that torch.compile has compiled"),
        (
            [UnitStats(recomputed_calls=1)],
            "unit x saved nothing: it was only called in reentrant checkpoints "
            "(use_reentrant=False offloads instead of recomputing)",
        ),
        (
            [replace(BUSY, recomputed_calls=1)],
            f"unit x: {human(BUSY.offloaded_bytes)} were moved that a checkpoint around makes again in backward all "
            'the same; to move what the checkpoints keep, select what is around them, such as "model" in a Hugging '
            "Face decoder",
        ),
        (
            [BUSY, replace(BUSY, unseen_checkpoints=2)],
            "unit x: deepspeed.checkpointing keeps its inputs where no hook sees them; "
            "use torch.utils.checkpoint.checkpoint with use_reentrant=False instead",
        ),
        ([SMALL], "unit x saved nothing that may be offloaded (too_small 4, parameter 1)" + LOWER_IT),
        ([SMALL, SMALL], "unit x saved nothing that may be offloaded (too_small 8, parameter 2)" + LOWER_IT),
        ([BARE], "unit x saved nothing that may be offloaded (nothing in it saves tensors for backward)"),
        ([HELD], "unit x freed nothing: something else held every storage until backward"),
        ([HELD, UnitStats()], "unit x freed nothing: something else held every storage until backward"),
        ([UnitStats(), BUSY], None),  # as under a pipeline: of use on some rank is enough
        ([HELD, HALF_HELD], None),
        ([KEPT], None),
        ([BUSY], None),
    ],
)
def test_what_is_said_of_a_unit_that_was_of_no_use(ranks: list[UnitStats], said: str | None) -> None:
    text = render([counts(rank, x=stats) for rank, stats in enumerate(ranks)])
    assert [line for line in remarks(text) if line.startswith("unit")] == ([said] if said else [])


def test_units_that_only_some_ranks_have_are_judged_by_those() -> None:
    """A pipeline's stages have different units."""
    text = render([counts(0, first=BUSY), counts(1, second=UnitStats())])
    said = [line for line in remarks(text) if line.startswith("unit")]
    assert said == ["unit second saved nothing: it was never called with gradients enabled, or only by compiled code"]


@pytest.mark.parametrize("name", ["model.layers.0.mlp", "a[bold]b", "experts[/]", "x" * 150])
def test_a_name_is_shown_whole_whatever_is_in_it(name: str) -> None:
    assert table(render([counts(0, **{name: BUSY})]))[1][1] == name
    assert f"unit {name} saved nothing" in render([counts(0, **{name: BARE})])


def test_the_root_has_a_name_too() -> None:
    assert shown("") == "(whole model)"
    assert table(render([counts(0, **{"": BUSY})]))[1][1] == "(whole model)"


def test_nothing_attached_to_is_an_empty_table() -> None:
    assert table(render([RankCounts(0, OffloadStats(), POOL)]))[1:] == [["0", "all units", "", *["-"] * 7]]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1024.0 KiB"),
        (MIB, "1.0 MiB"),
        (5 * GIB, "5.0 GiB"),
        (5000 * GIB, "5000.0 GiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_are_short(size_bytes: int, text: str) -> None:
    assert human(size_bytes) == text


def test_counts_survive_json() -> None:
    found = json.loads(json.dumps(counts(3, live_host_bytes=5, a=BUSY, b=SMALL).as_dict()))
    assert found["rank"] == 3
    assert (found["saved_bytes"], found["offloaded_bytes"], found["kept_bytes"]) == (10 * MIB, 7 * MIB, 3 * MIB)
    assert (found["reloaded_bytes"], found["late_reloads"], found["live_host_bytes"]) == (4 * MIB, 5, 5)
    assert found["skipped"] == {"parameter": 13, "host_full": 3, "too_small": 4}
    assert found["units"]["b"]["skipped"] == {"too_small": 4, "parameter": 1}
    assert found["units"]["a"]["held_bytes"] == MIB
    assert found["pool_peak_leased_bytes"] == 12 * MIB
    assert found["pool_limit_bytes"] == 4 * GIB


TIMED = UnitStats(
    calls=2,
    saved_bytes=4 * MIB,
    offloaded_bytes=4 * MIB,
    reloaded_bytes=4 * MIB,
    copying_out_ms=0.1,
    copying_in_ms=0.2,
    timed_out_bytes=4 * 10**6,
    timed_in_bytes=3 * 10**6,
    stalled_ms=1.26,
)


def test_times_have_columns_where_any_are_known() -> None:
    text = render([counts(0, **{"layers.0.mlp": TIMED, "layers.1.mlp": TIMED, "head": BUSY})])
    assert [row[-4:] for row in table(text)] == [
        ["late", "stalled", "GB/s out", "GB/s in"],
        ["-", "2.5 ms", "40.0", "15.0"],
        ["5", "-", "-", "-"],
        ["5", "2.5 ms", "40.0", "15.0"],
    ]


def told(rounds: RoundStats) -> list[str]:
    return remarks(render([RankCounts(3, total({}, 0, rounds), POOL)]))[1:]


def test_the_plan_is_told() -> None:
    planned = Planned(3 * GIB, 7 * GIB, 1.25, 340.04, peak_bytes=20 * GIB, peak_without_bytes=22 * GIB)
    said = "rank 3: planned: 3.0 GiB of 7.0 GiB a round are copied, "
    end = "compute waits 1.2 of 340.0 ms; the table counts the rounds before it, too"
    assert told(RoundStats(planned)) == [said + "the peak falls by 2.0 GiB to 20.0 GiB, " + end]
    everything = replace(planned, peak_bytes=None, peak_without_bytes=None)
    assert told(RoundStats(everything)) == [said + end]
    assert told(RoundStats()) == []


@pytest.mark.parametrize(
    ("after", "before", "where"),
    [
        ("layers.0.gate", "layers.0.experts", "between layers.0.gate and layers.0.experts"),
        ("layers.0.moe", "layers.0.moe", "within layers.0.moe"),
        (None, "embed", "before embed"),
        ("head", None, "after head"),
        ("", "", "within (whole model)"),
    ],
)
def test_where_the_device_is_read(after: str | None, before: str | None, where: str) -> None:
    read = ReadDelay(after, before, rounds=4, waited_ms=10.0, last_waited_ms=0.2)
    said = f"rank 3: the device was read {where}: copies kept it waiting "
    assert told(RoundStats(reads=[read])) == [said + "2.5 ms a round, 0.2 ms in the last that was looked at"]


def test_reads_of_each_layer_are_one_line() -> None:
    reads = [ReadDelay(f"layers.{n}.gate", f"layers.{n}.mlp", 2, 4.0, 1.0) for n in range(4)]
    reads += [ReadDelay(f"layers.{n}", f"layers.{n + 1}") for n in range(3)]
    assert told(RoundStats(reads=reads)) == [
        "rank 3: the device was read between layers.{0..3}.gate and layers.{0..3}.mlp: copies kept it waiting "
        "8.0 ms a round, 4.0 ms in the last that was looked at",
        "rank 3: the device was read between layers.{0..2} and layers.{1..3}: how long copies kept it waiting is not "
        "clear yet",
    ]


def test_times_survive_json() -> None:
    rounds = RoundStats(Planned(1, 2, 0.5, 3.0), [ReadDelay("a", None, 1, 2.0, 2.0)])
    found = json.loads(json.dumps(RankCounts(0, total({"a": TIMED}, 0, rounds), POOL).as_dict()))
    assert found["rounds"]["planned"]["copied_bytes"] == 1
    assert found["rounds"]["reads"][0]["waited_ms"] == 2.0
    assert found["units"]["a"]["stalled_ms"] == 1.26
