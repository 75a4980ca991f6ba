"""A recorded step: what is computed from it, and what is drawn of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_fgoffload.cli import main as cli
from ds_fgoffload.cli.sample import recording as made_by_hand
from ds_fgoffload.profiling.recording import RecordingError, Stall, StepRecording, StorageTimes
from ds_fgoffload.reporting.chrome_trace import chrome_trace
from ds_fgoffload.reporting.page import page
from tests.helpers.step_recording import MIB, recording


def step(*storages: StorageTimes, **more: object) -> StepRecording:
    return StepRecording("t", 100.0, storages, **more)


KEPT = StorageTimes("a", 100, saved_ms=10, freed_ms=90)
MOVED = StorageTimes("b", 50, saved_ms=20, freed_ms=80, d2h=(21, 31), released_ms=35, h2d=(60, 70))
HELD = StorageTimes("c", 7, saved_ms=30, freed_ms=70, d2h=(31, 32))
DROPPED = StorageTimes("d", 3, saved_ms=40, freed_ms=50, d2h=(40, 41), released_ms=42)


def test_bytes_over_time_with_and_without() -> None:
    both = step(KEPT, MOVED)
    assert both.saved_bytes(offloaded=False) == [(0, 0), (10, 100), (20, 150), (80, 100), (90, 0)]
    assert both.saved_bytes(offloaded=True) == [(0, 0), (10, 100), (20, 150), (35, 100), (60, 150), (80, 100), (90, 0)]


def test_what_was_held_or_never_came_back() -> None:
    assert step(HELD).saved_bytes(offloaded=True) == [(0, 0), (30, 7), (70, 0)]
    assert step(DROPPED).saved_bytes(offloaded=True) == [(0, 0), (40, 3), (42, 0)]
    assert step(DROPPED).saved_bytes(offloaded=False) == [(0, 0), (40, 3), (50, 0)]


def test_rates_count_the_time_in_which_anything_was_copied() -> None:
    one = StorageTimes("a", 10**9, 0, 99, d2h=(0, 20))
    overlapping = replace(one, d2h=(10, 40))
    assert step(one, overlapping).rate_gb_s("d2h") == pytest.approx(2 / 0.040)
    assert step(one).rate_gb_s("h2d") == 0
    assert step(stalls=(Stall("a", 1, 3, "reload"), Stall("b", 5, 6, "release"))).stalled_ms == 3


def test_json_there_and_back() -> None:
    made = replace(recording(), memory=((0.0, 5.0), (50.0, 7.0)))
    assert StepRecording.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"title": "t", "step_ms": 1, "storages": [{"unit": "a"}]}',
        '{"title": "t", "step_ms": "x", "storages": []}',
    ],
)
def test_what_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="not a recording of a step"):
        StepRecording.from_json(text)
    with pytest.raises(RecordingError, match="No such file"):
        StepRecording.read(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"step_ms": 120.0', '"step_ms": NaN', "step_ms is nan"),
        ('"saved_ms": 4.0', '"saved_ms": 1e999', r"storages\[0\]\.saved_ms is inf"),
    ],
)
def test_the_command_refuses_what_cannot_be_drawn(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "step.json"
    text = made_by_hand().to_json()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    result = CliRunner().invoke(cli.app, ["draw", str(file), "--out", str(tmp_path / "step.html")])
    assert re.search(message, str(result.exception))
    assert isinstance(result.exception, RecordingError)


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_has_all_it_needs_in_itself() -> None:
    text = page(recording())
    data = data_of(text)
    assert data["families"]["model.layers.2.mlp"] == "model.layers.{0..3}.mlp"
    assert max(size for _, size in data["without"]) == 4 * (192 + 256) * MIB
    assert max(size for _, size in data["with"]) < 0.6 * max(size for _, size in data["without"])
    assert "<title>One step of a small decoder</title>" in text
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, nothing that is fetched
    assert "/*DATA*/" not in text


def test_names_cannot_end_the_script() -> None:
    wicked = "</script><script>alert(1)</script>"
    text = page(replace(recording(), title=wicked, storages=(replace(KEPT, unit=wicked),)))
    assert text.count("</script>") == page(recording()).count("</script>")
    assert data_of(text)["storages"][0]["unit"] == wicked


def test_the_trace_has_lanes_and_counters() -> None:
    events = json.loads(chrome_trace(recording()))["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [(lanes[e["tid"]], e["name"]) for e in events if e["ph"] == "X"]
    assert spans.count(("d2h", "model.layers.0.mlp")) == 1
    assert sum(lane == "h2d" for lane, _ in spans) == 6
    assert ("stalls", "model.layers.1.mlp (release)") in spans
    late = next(e for e in events if e["ph"] == "X" and e["args"].get("late"))
    assert (late["name"], late["ts"]) == ("model.layers.0.mlp", recording().stalls[0].start_ms * 1e3)
    assert {e["name"] for e in events if e["ph"] == "C"} == {"saved, with offloading", "saved, without"}


def test_the_command_draws_a_sample_without_a_file(tmp_path: Path) -> None:
    html = tmp_path / "step.html"
    result = CliRunner().invoke(cli.app, ["draw", "--sample", "--out", str(html)])
    assert result.exit_code == 0, result.output
    assert "One step of a small decoder" in html.read_text()
    assert "draw --sample" in CliRunner().invoke(cli.app, ["draw", "--help"]).output


@pytest.mark.parametrize("arguments", [[], ["--sample", "step.json"]])
def test_the_command_draws_a_file_or_the_sample(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["draw", *arguments])
    assert result.exit_code == 2
    assert "or --sample" in result.output


def test_the_command_draws_both(tmp_path: Path) -> None:
    source, html, trace = tmp_path / "step.json", tmp_path / "step.html", tmp_path / "trace.json"
    source.write_text(recording().to_json())
    result = CliRunner().invoke(cli.app, ["draw", str(source), "--out", str(html), "--trace", str(trace)])
    assert result.exit_code == 0, result.output
    assert data_of(html.read_text())["title"] == "One step of a small decoder"
    assert json.loads(trace.read_text())["traceEvents"]
    source.write_text("{}")
    with pytest.raises(RecordingError):
        CliRunner().invoke(cli.app, ["draw", str(source)], catch_exceptions=False)
