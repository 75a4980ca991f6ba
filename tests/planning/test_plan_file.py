"""What plans are made from lasts: a later run follows the same plans from its first step, or says why it does not."""

import itertools
import json
import random
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fgoffload.errors import PlanFileError
from ds_fgoffload.planning import plan_file
from ds_fgoffload.planning.plan_file import (
    Header,
    MachineOnFile,
    ModelOnFile,
    PlanFile,
    PlanStore,
    UnitOnFile,
    file_of,
    of_rank,
    read,
)
from ds_fgoffload.planning.planner import PlanGoal
from ds_fgoffload.planning.tuner import Tuner
from tests.helpers.changing import ALL, KINDS, LAYERS, Training, Work

GOAL = PlanGoal(max_overhead=0.0)
LINK = 6000.0
UNITS = {
    f"model.layers.{n}.mlp": UnitOnFile(module_class="MLP", parameter_elements=1000, recompute=n == 1) for n in range(7)
}
MOE = UnitOnFile(module_class="Moe", parameter_elements=2)
MODEL = ModelOnFile(
    model_class="Lm", engine="DeepSpeedEngine, ZeRO 3", ranks=2, min_tensor_bytes=1024, excluded=["a"], units=UNITS
)
HEADER = Header(
    versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
    rank=0,
    model=MODEL,
    machine=MachineOnFile(device="NVIDIA H200", memory_bytes=140 << 30),
    max_overhead=0.0,
)


@pytest.fixture
def said(monkeypatch):
    messages = []
    monkeypatch.setattr(plan_file, "warn_here", messages.append)
    return messages


def changed(**changes):
    return HEADER.model_copy(update=changes)


def steps_of(kind, count, seed=0):
    return list(itertools.islice(KINDS[kind](random.Random(seed)), count))


def trained(steps, store, link=LINK):
    training = Training(GOAL, link, store)
    for work in steps:
        training.step(work)
    training.offloader.stats()
    return training


def plans_of(training):
    return {one.size: one.forecast for one in training.offloader._tuner._classes if one.forecast is not None}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plans" / "run.json"


@pytest.fixture
def written(path):
    """A file that 40 steps of changing length have left."""
    training = trained(steps_of("uniform lengths", 40), PlanStore(path, HEADER))
    training.offloader.end()
    return training


@pytest.mark.parametrize("kind", ["uniform lengths", "mixed micro-batches", "sites that come and go"])
def test_the_plans_of_a_later_run_are_those_that_the_last_would_have_made(path, kind, said):
    training = trained(steps_of(kind, 40), PlanStore(path, HEADER))
    training.offloader.end()
    tuner = training.offloader._tuner
    again = Training(GOAL, LINK, PlanStore(path, HEADER)).offloader._tuner
    assert said == []
    assert [(one.size, one.caution) for one in again._classes] == [(one.size, one.caution) for one in tuner._classes]
    for one, other in zip(tuner._classes, again._classes, strict=True):
        assert [each.profile for each in one.known] == [each.profile for each in other.known]
        assert [each.peak_between_bytes for each in one.known] == [each.peak_between_bytes for each in other.known]
    largest = again._largest()
    assert largest.forecast is not None
    assert len(largest.forecast.points.moved) > 0


def test_the_second_step_is_as_good_as_the_fortieth(path, said):
    steps = [Work(8192, ALL)] * 40
    first = Training(GOAL, LINK, PlanStore(path, HEADER))
    for work in steps:
        first.streams.peak_bytes = 0
        first.step(work)
    fortieth_bytes, pinned_bytes = first.streams.peak_bytes, first.offloader._pool.stats().pinned_bytes
    first.offloader.end()
    second = Training(GOAL, LINK, PlanStore(path, HEADER))
    peaks = []
    for work in steps[:2]:
        second.streams.peak_bytes = 0
        second.step(work)
        peaks.append(second.streams.peak_bytes)
    assert peaks[0] <= 1.02 * fortieth_bytes
    assert peaks[1] <= fortieth_bytes
    assert second.streams.waited_ms == 0
    assert second.offloader._pool.stats().pinned_bytes <= 1.05 * pinned_bytes
    unplanned = Training(GOAL, LINK)
    unplanned.step(steps[0])
    unplanned.step(steps[1])
    assert unplanned.streams.peak_bytes > 1.1 * fortieth_bytes
    assert said == []


def test_what_is_written_is_json_without_anything_to_run(path, written):
    content = json.loads(path.read_text())
    assert content["format"] == 1
    assert content["model"]["units"]["model.layers.1.mlp"] == {
        "module_class": "MLP", "parameter_elements": 1000, "recompute": True
    }  # fmt: skip
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert read(path).model_dump() == content


@pytest.mark.parametrize(
    ("header", "difference"),
    [
        (
            changed(machine=MachineOnFile(device="NVIDIA H100", memory_bytes=140 << 30)),
            "device NVIDIA H100 instead of NVIDIA H200",
        ),
        (
            changed(machine=MachineOnFile(device="NVIDIA H200", memory_bytes=80 << 30)),
            "80.0 GiB of device memory instead of 140.0 GiB",
        ),
        (changed(model=MODEL.model_copy(update={"ranks": 4})), "ranks 4 instead of 2"),
        (
            changed(model=MODEL.model_copy(update={"engine": "no engine"})),
            "engine 'no engine' instead of 'DeepSpeedEngine, ZeRO 3'",
        ),
        (changed(model=MODEL.model_copy(update={"model_class": "Lm2"})), "model_class 'Lm2' instead of 'Lm'"),
        (changed(model=MODEL.model_copy(update={"min_tensor_bytes": 0})), "min_tensor_bytes 0 instead of 1024"),
        (changed(model=MODEL.model_copy(update={"excluded": []})), "excluded [] instead of ['a']"),
        (
            changed(model=MODEL.model_copy(update={"units": dict(list(UNITS.items())[1:])})),
            "unit model.layers.0.mlp is not here",
        ),
        (
            changed(model=MODEL.model_copy(update={"units": {**UNITS, "head": UNITS["model.layers.0.mlp"]}})),
            "unit head is not in the file",
        ),
        (
            changed(model=MODEL.model_copy(update={"units": {**UNITS, "model.layers.1.mlp": MOE}})),
            "unit model.layers.1.mlp is Moe with 2 elements instead of recomputed, MLP with 1000 elements",
        ),
        (
            changed(model=MODEL.model_copy(update={"units": {}})),
            "; ".join(f"unit model.layers.{n}.mlp is not here" for n in range(4)) + "; and 3 more",
        ),
    ],
)
def test_a_file_of_something_else_is_refused_with_the_differences(path, written, said, header, difference):
    training = Training(GOAL, LINK, PlanStore(path, header))
    assert said == [
        f"fine_grained_offload.plan_file: {path} was written for something else: {difference}. Training goes on "
        "without it; the file will be overwritten"
    ]
    assert training.offloader._tuner.forecast is None
    for work in steps_of("uniform lengths", 20):
        training.step(work)
    training.offloader.end()
    assert read(path).model == header.model
    assert len(said) == 1


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda text: text[: len(text) // 2], "the file: Invalid JSON"),
        (lambda text: "", "the file: Invalid JSON"),
        (lambda text: text.replace('"format":1', '"format":2'), "format: Input should be 1"),
        (lambda text: text.replace('"format"', '"extra":"__import__(1)","format"'), "extra: Extra inputs"),
        (lambda text: text.replace('"guessed":false', '"guessed":"no"'), "guessed: Input should be a valid boolean"),
        (lambda text: text.replace('"moments":[0,', '"moments":[100000,'), "names a moment that is not in the list"),
        (lambda text: text.replace('"moments":[0,', '"moments":[-1,'), "moments.0: Input should be greater than"),
        (lambda text: text.replace('"at_ms":[', '"at_ms":[1e9,'), "have as many entries"),
        (lambda text: text.replace('"d2h_bytes_per_ms":', '"d2h_bytes_per_ms":-'), "d2h_bytes_per_ms: Input should be"),
        (lambda text: text.replace('"read_at_ms":{}', '"read_at_ms":{"a":1.0}'), "has the numbers of entries as keys"),
    ],
)
def test_a_file_that_is_spoilt_is_refused(path, written, said, spoil, fault):
    text = path.read_text()
    spoilt = spoil(text)
    assert spoilt != text
    path.write_text(spoilt)
    training = trained(steps_of("uniform lengths", 3), PlanStore(path, HEADER))
    assert len(said) == 1
    assert f"{path} is not a plan file of format 1: " in said[0]
    assert fault in said[0]
    assert training.offloader._tuner.forecast is None


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "run.json"
    training = trained([Work(2048, ALL)] * 8, PlanStore(path, HEADER))
    training.offloader.end()
    return path.read_text()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_file_does_more_than_be_refused(text, tmp_path_factory, data):
    position = data.draw(st.integers(0, len(text) - 1))
    with_text = data.draw(st.text(alphabet='0123456789-.e{}[],":ntrue', max_size=4))
    length = data.draw(st.integers(0, 4))
    path = tmp_path_factory.getbasetemp() / "spoilt.json"
    path.write_text(text[:position] + with_text + text[position + length :])
    try:
        assert isinstance(read(path), PlanFile)
    except PlanFileError:
        return
    training = Training(GOAL, LINK, PlanStore(path, HEADER))
    training.step(Work(2048, ALL))


def test_a_link_that_has_become_slower_is_seen_in_three_rounds(path, said):
    steps = [Work(8192, ALL)] * 20
    trained(steps, PlanStore(path, HEADER)).offloader.end()
    training = trained(steps[:5], PlanStore(path, HEADER), link=LINK / 2)
    assert said == [
        f"fine_grained_offload.plan_file: {path} was written for a link to the host of 5.7 MiB/s, and this one carries "
        "2.9 MiB/s. Training goes on without it; the file will be overwritten"
    ]
    for work in steps:
        training.step(work)
    training.offloader.end()
    rates = {each.d2h_bytes_per_ms for one in read(path).classes for each in one.rounds}
    assert max(rates) < 0.55 * LINK


def test_a_link_that_is_as_fast_is_not_complained_of(path, written, said):
    trained(steps_of("uniform lengths", 10), PlanStore(path, HEADER), link=0.9 * LINK)
    assert said == []


def test_a_file_that_cannot_be_written_is_said_once(tmp_path, said):
    (tmp_path / "file").write_text("")
    store = PlanStore(tmp_path / "file" / "run.json", HEADER)
    training = trained(steps_of("uniform lengths", 70), store)
    training.offloader.end()
    assert len(said) == 1
    assert "cannot be written: " in said[0]


def test_a_file_that_cannot_be_read_is_said(path, written, said, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    assert PlanStore(path, HEADER).known() == []
    assert said == [
        f"fine_grained_offload.plan_file: {path} cannot be read: [Errno 13] Permission denied. Training goes on "
        "without it; the file will be overwritten"
    ]


def test_nothing_is_written_before_there_is_a_plan(path):
    training = trained([Work(2048, ALL)], PlanStore(path, HEADER))
    training.offloader.end()
    assert not path.exists()


def test_it_is_written_while_training_goes_on(path):
    store = PlanStore(path, HEADER)
    training = trained(steps_of("three buckets", 30), store)
    store.finish()
    before = read(path)
    for work in steps_of("three buckets", 40, seed=1):
        training.step(work)
    store.finish()
    assert read(path).classes != before.classes
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR


@pytest.mark.parametrize(
    ("path", "ranks", "found"),
    [
        ("a/run.json", 1, "a/run.json"),
        ("a/run.json", 4, "a/run.rank3.json"),
        ("a/{rank}/run.json", 4, "a/3/run.json"),
        ("{rank}", 1, "3"),
        ("plan", 2, "plan.rank3"),
    ],
)
def test_ranks_keep_their_own(path, ranks, found):
    assert str(of_rank(path, 3, ranks)) == found


def test_units_that_were_there_and_come_no_more_are_learned_anew(path, said):
    trained([Work(8192, ALL)] * 20, PlanStore(path, HEADER)).offloader.end()
    half = tuple(float(number < LAYERS // 2) for number in range(LAYERS))
    training = trained([Work(8192, half)] * 12, PlanStore(path, HEADER))
    moved = training.offloader._tuner.forecast.points.moved
    assert moved
    assert all(place.site.unit in {f"units.{number}" for number in range(LAYERS // 2)} for place in moved)
    assert said == []


def test_the_caution_that_was_learned_is_kept(path):
    store = PlanStore(path, HEADER)
    training = trained([Work(8192, ALL)] * 10, store)
    training.offloader._tuner._largest().caution = 1.25
    training.offloader.end()
    again = Training(GOAL, LINK, PlanStore(path, HEADER)).offloader._tuner
    assert isinstance(again, Tuner)
    assert again._largest().caution == 1.25


def test_a_header_alone_makes_no_file():
    with pytest.raises(ValueError, match="classes"):
        file_of(HEADER, [])
