"""``ds-fgoffload plan``: of a file, under other settings, beside another, and what is said of what it cannot use."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_fgoffload.cli import main as cli
from ds_fgoffload.planning.plan_file import Header, MachineOnFile, ModelOnFile, PlanStore, UnitOnFile, read, write
from ds_fgoffload.planning.planner import PlanGoal
from tests.helpers.changing import ALL, LAYERS, Training, Work

TOKENS = 8192
LINK = 2000.0
UNITS = {f"units.{n}": UnitOnFile(module_class="Unit", parameter_elements=0) for n in range(LAYERS)}
ACTS = {f"acts.{n}": UnitOnFile(module_class="Act", parameter_elements=0, recompute=True) for n in range(2)}
HEADER = Header(
    versions={},
    rank=1,
    model=ModelOnFile(
        model_class="Model", engine="plain", ranks=4, min_tensor_bytes=0, excluded=[], units={**UNITS, **ACTS}
    ),
    machine=MachineOnFile(device="no device", memory_bytes=1 << 40),
    max_overhead=0.0,
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_console", lambda: cli.Console(width=200))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "run.json"
    training = Training(PlanGoal(max_overhead=0.0), LINK, PlanStore(path, HEADER))
    for _ in range(20):
        training.step(Work(TOKENS, ALL))
    training.offloader.stats()
    training.offloader.end()
    return path


@pytest.fixture
def other(file: Path, tmp_path: Path) -> Path:
    """The same of a run that was allowed a fifth of the time."""
    path = tmp_path / "other.json"
    write(path, read(file).model_copy(update={"max_overhead": 0.2}))
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: object) -> dict:
    return json.loads(run(*arguments, "--json"))


def refused(monkeypatch, capsys, *arguments: object) -> str:
    """What is said, on the standard error alone, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", said.err).split())


def row(output: str, name: str) -> list[str]:
    return re.split(r"\s{2,}", next(line for line in output.splitlines() if line.strip().startswith(name)).strip())


def test_what_happens_to_each_family_and_what_time_buys(file: Path) -> None:
    output = run(file)
    assert "run.json: Model, plain, rank 1 of 4, no device; micro-batches of 8193 tokens or elements" in output
    assert "planned: 32.0 KiB of 96.0 KiB a round are copied, the peak falls by 32.0 KiB to 64.0 KiB" in output
    use = f"{100 * 4 * TOKENS / (LINK * 57.1):.1f}% of 1.9 MiB/s"
    assert f"link: {use} out, {use} in" in output
    family = row(output, "units.{0..11}")
    assert family[1:5] == ["96.0 KiB", "32.0 KiB", "64.0 KiB", "-"]
    assert family[-1] == "moved, kept"
    assert row(output, "acts.{0,1}")[-1] == "recomputed"
    assert row(output, "0.2 ")[1:3] == ["56.0 KiB", "40.0 KiB"]
    assert row(output, "any")[1:3] == ["72.0 KiB", "24.0 KiB"]


def test_each_unit_has_a_row_where_that_is_asked_for(file: Path) -> None:
    output = run(file, "--expand")
    assert row(output, "units.0 ")[1:4] == ["8.0 KiB", "8.0 KiB", "-"]
    assert row(output, "units.0 ")[-1] == "moved"
    assert row(output, "units.11 ")[-1] == "kept"
    assert row(output, "acts.1 ")[-1] == "recomputed"
    assert "units.{" not in output


def test_the_same_as_json_and_nothing_else(file: Path) -> None:
    found = as_json(file)
    assert found.keys() == {
        "file", "written_at", "model", "engine", "rank", "ranks", "device", "settings", "tokens", "known_tokens",
        "length_ms", "added_ms", "added", "peak_without_bytes", "peak_bytes", "freed_bytes", "room_bytes", "fits",
        "saved_bytes", "moved_bytes", "link", "units", "places", "curve", "verdict",
    }  # fmt: skip
    assert found["settings"] == {
        "max_overhead": 0.0,
        "target_saved_bytes": None,
        "device_memory_bytes": 1 << 40,
        "link_bytes_per_s": None,
        "link_times": 1.0,
        "tokens": None,
    }
    assert found["freed_bytes"] == found["peak_without_bytes"] - found["peak_bytes"] == 4 * TOKENS
    assert found["units"]["units.0"] == {
        "saved_bytes": TOKENS, "moved_bytes": TOKENS, "kept_bytes": 0, "held_bytes": 0, "recomputed": False
    }  # fmt: skip
    assert found["units"]["acts.0"]["recomputed"]
    places = found["places"]
    assert len(places) == LAYERS
    assert places[0].keys() == {
        "micro_batch", "unit", "call", "save", "bytes", "treatment", "saved_ms", "leaves_ms", "comes_back_ms",
        "needed_ms",
    }  # fmt: skip
    assert sum(one["bytes"] for one in places if one["treatment"] == "moved") == found["moved_bytes"]
    use = found["moved_bytes"] / (LINK * found["length_ms"])
    assert found["link"]["out"] == pytest.approx({"bytes_per_s": 1000 * LINK, "use": use})
    assert [one["max_overhead"] for one in found["curve"]] == [0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, None]
    assert found["curve"][0].keys() == {
        "max_overhead", "set_to", "freed_bytes", "peak_bytes", "moved_bytes", "added_ms", "added"
    }  # fmt: skip


def test_options_change_what_they_name_and_leave_the_rest(file: Path) -> None:
    plain = as_json(file)
    faster = as_json(file, "--link", "4MB/s")
    assert faster["settings"] == {**plain["settings"], "link_bytes_per_s": 4e6}
    assert faster["freed_bytes"] > plain["freed_bytes"]
    assert faster["places"] == as_json(file, "--link", "2x")["places"]
    assert as_json(file, "--max-overhead", "20%")["curve"] == plain["curve"]
    assert as_json(file, "--max-overhead", "20%")["freed_bytes"] == plain["curve"][7]["freed_bytes"]
    assert as_json(file, "--max-overhead", "0.2")["places"] == as_json(file, "--max-overhead", "20%")["places"]
    less = as_json(file, "--target", "8KiB")
    assert 8192 <= less["freed_bytes"] < plain["freed_bytes"]
    longer = as_json(file, "--tokens", 2 * TOKENS)
    assert longer["tokens"] == 2 * TOKENS
    assert longer["peak_without_bytes"] == pytest.approx(2 * plain["peak_without_bytes"], rel=0.02)
    small = as_json(file, "--device-memory", "60KB")
    assert plain["peak_bytes"] > small["room_bytes"] >= small["peak_bytes"]
    assert small["added_ms"] > 0
    assert small["fits"]


def test_none_takes_away_what_the_file_asks_for(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(path, read(file).model_copy(update={"max_overhead": None, "target_saved_bytes": 8192}))
    assert as_json(path)["freed_bytes"] == 8192
    assert as_json(path, "--target", "none")["freed_bytes"] == as_json(file)["freed_bytes"]
    assert as_json(file, "--max-overhead", "none")["settings"]["max_overhead"] is None


def test_what_does_not_fit_and_what_was_never_seen_is_said(file: Path) -> None:
    assert "DOES NOT FIT" not in run(file)
    assert "no round of this size was seen" not in run(file)
    assert "DOES NOT FIT: the peak is" in run(file, "--device-memory", "10KB")
    assert "no round of this size was seen" in run(file, "--tokens", 16384)


def test_where_it_does_not_pay_it_says_so(file: Path) -> None:
    said = "offloading does not pay here, and nothing is moved: it would free"
    assert said in " ".join(run(file, "--link", "0.02x", "--max-overhead", "0").split())
    assert said not in " ".join(run(file).split())
    assert as_json(file, "--link", "0.02x", "--max-overhead", "0")["moved_bytes"] == 0


def test_two_files_beside_each_other(file: Path, other: Path) -> None:
    output = run(file, other)
    assert row(output, "peak without") == ["peak without", "96.0 KiB", "96.0 KiB", "0 B"]
    assert row(output, "peak  ") == ["peak", "64.0 KiB", "40.0 KiB", "-24.0 KiB"]
    assert row(output, "freed") == ["freed", "32.0 KiB", "56.0 KiB", "+24.0 KiB"]
    both = as_json(file, other)
    assert both["plans"] == [as_json(file), as_json(other)]
    differing = {one["unit"] for one in both["differences"]}
    assert differing
    first, second = (
        {unit for unit, one in plan["units"].items() if one["moved_bytes"]} for plan in both["plans"]
    )  # fmt: skip
    assert differing == first ^ second
    for unit in differing:
        assert row(run(file, other, "--expand"), f"{unit} ")[1:] == [
            f"{'8.0 KiB' if unit in moved else '0 B'} of 8.0 KiB moved" for moved in (first, second)
        ]


def test_a_file_given_twice_is_beside_itself_under_the_options(file: Path) -> None:
    both = as_json(file, file, "--link", "0.5x")
    assert both["plans"] == [as_json(file), as_json(file, "--link", "0.5x")]
    output = run(file, file, "--link", "0.5x")
    assert re.search(r"run\.json\s+run\.json --link 0\.5x", output)


def test_plans_that_are_alike_are_said_to_be(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / file.name
    copy.write_bytes(file.read_bytes())
    output = run(file, copy)
    assert "Both move the same of each unit" in output
    assert str(copy) in output.replace("\n", "")
    assert as_json(file, copy)["differences"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "25GB"], "--link 25GB: allowed: a rate above 0 such as 25GB/s, or how many times as fast"),
        (["--link", "0GB/s"], "--link 0GB/s: allowed: a rate above 0"),
        (["--link", "-1x"], "--link -1x: allowed: a rate above 0"),
        (["--link", "infx"], "--link infx: allowed: a rate above 0"),
        (["--link", "fast"], "--link fast: allowed: a rate above 0"),
        (["--target", "much"], '--target much: allowed: a whole number of bytes >= 0, or text such as "64MiB"'),
        (["--device-memory", "0"], "--device-memory 0: allowed: more than 0 bytes, such as 80GB"),
        (["--max-overhead", "-0.1"], "--max-overhead -0.1: allowed: the part of the time that may be added"),
        (["--max-overhead", "nan"], "--max-overhead nan: allowed: the part of the time that may be added"),
        (["--max-overhead", "5"], "such as 0.01, or 1% (5 would be 500%; write that if it is meant), or none"),
        (["--tokens", "0"], "--tokens"),
        (["--picture", "curve.pdf"], "--picture curve.pdf: allowed: a name that ends in .svg or .png"),
        (["--picture", "no/such/folder/curve.svg"], "there is no folder no/such/folder"),
        (["a", "b"], "give one plan file, or two to compare: got 3"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_allowed(file: Path, monkeypatch, capsys, arguments, message) -> None:
    assert message in refused(monkeypatch, capsys, file, *arguments)


def test_a_file_that_is_none_is_refused(file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    remedy = "give a file that training wrote for the key plan_file of the fine_grained_offload section"
    missing = refused(monkeypatch, capsys, tmp_path / "none.json")
    assert "none.json cannot be read: [Errno 2]" in missing
    assert missing.endswith(remedy)
    (tmp_path / "step.json").write_text('{"format": 2}')
    spoilt = refused(monkeypatch, capsys, tmp_path / "step.json", "--json")
    assert "step.json is not a plan file of format 1: format: Input should be 1" in spoilt
    assert spoilt.endswith(remedy)
    assert "is given twice and without an option" in refused(monkeypatch, capsys, file, file)


def test_a_file_that_tells_nothing_of_memory_is_refused(file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    content = read(file)
    rounds = [one.model_copy(update={"memory_bytes": []}) for one in content.classes[0].rounds]
    path = tmp_path / "run.json"
    write(path, content.model_copy(update={"classes": [content.classes[0].model_copy(update={"rounds": rounds})]}))
    assert f"{path}: memory was not looked at in any of its rounds" in refused(monkeypatch, capsys, path)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_curve_is_drawn(file: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"curve.{suffix}"
    found = as_json(file, file, "--link", "2x", "--picture", path)
    assert len(found["plans"]) == 2
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        assert b"run.json --link 2x" in content
        assert b"peak memory freed, KiB" in content


def test_a_picture_without_matplotlib_says_what_to_install(file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "plan", str(file), "--picture", str(tmp_path / "curve.svg")])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 1
    assert "--picture needs the package matplotlib: pip install" in capsys.readouterr().err
