"""A step of training on a device in virtual time, as it is recorded and written for the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ds_fgoffload
from ds_fgoffload import api
from ds_fgoffload.device.streams import Fence
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.host_memory.pool import HostPool, HostPoolSettings
from ds_fgoffload.planning.planner import PlanGoal
from ds_fgoffload.profiling.recording import StepRecording
from ds_fgoffload.profiling.round_times import Wait, wait_spans
from ds_fgoffload.reporting.page import page
from ds_fgoffload.saved.transfer import Transfer
from ds_fgoffload.schedule.plan import Plan
from ds_fgoffload.stats import UnitStats
from tests.helpers.simulated import Event, Layer, SimulatedStreams, Training

LAYER_BYTES = 4000
LAYERS = 8
EVERYTHING = PlanGoal(everything=True)


def recorded(training: Training, rounds: int = 12) -> tuple[StepRecording, float]:
    """A step in steady state, and how long compute waited in it."""
    for _ in range(rounds):
        training.step()
    seen: list[StepRecording] = []
    recorder = training.offloader._transfer.recorder
    recorder.show(seen.append)
    waited_ms = training.streams.waited_ms
    training.step()
    waited_ms = training.streams.waited_ms - waited_ms
    assert seen == []
    training.step()
    training.offloader.stats()
    (step,) = seen
    return step, waited_ms


def test_every_storage_goes_its_way_in_order() -> None:
    step, _ = recorded(Training(goal=EVERYTHING, link_bytes_per_ms=5000))
    assert [(s.unit, s.bytes) for s in step.storages] == [(str(n), LAYER_BYTES) for n in range(LAYERS)]
    for storage in step.storages:
        begin_ms, end_ms = storage.d2h
        assert end_ms - begin_ms == pytest.approx(LAYER_BYTES / 5000)
        assert 0 <= storage.saved_ms <= begin_ms
        assert storage.freed_ms <= step.step_ms
        if storage.released_ms is not None:
            assert end_ms <= storage.released_ms <= storage.h2d[0] < storage.h2d[1] <= storage.freed_ms
            assert storage.h2d[1] - storage.h2d[0] == pytest.approx(LAYER_BYTES / 5000)
    away = [storage for storage in step.storages if storage.released_ms is not None]
    assert len(away) >= LAYERS - 3
    assert sum(s.h2d is not None for s in step.storages) == len(away)
    assert not any(storage.late for storage in step.storages)
    assert step.rate_gb_s("d2h") == pytest.approx(5000 / 1e6)


def test_the_curves_are_those_of_the_device() -> None:
    training = Training(goal=EVERYTHING, link_bytes_per_ms=20000)
    step, _ = recorded(training)
    assert max(size for _, size in step.saved_bytes(offloaded=False)) == LAYERS * LAYER_BYTES
    assert max(size for _, size in step.saved_bytes(offloaded=True)) <= 3 * LAYER_BYTES
    assert max(size for _, size in step.memory) <= training.streams.peak_bytes
    assert len(step.memory) >= 4 * LAYERS
    assert step.saved_bytes(offloaded=True)[-1][1] == 0


def test_calls_forward_and_backward_take_as_long_as_the_layers() -> None:
    step, _ = recorded(Training(goal=EVERYTHING, link_bytes_per_ms=20000))
    forward = [call for call in step.calls if not call.backward]
    backward = [call for call in step.calls if call.backward]
    assert [call.unit for call in forward] == [str(n) for n in range(LAYERS)]
    assert [call.unit for call in backward] == [str(n) for n in reversed(range(LAYERS))]
    assert [call.end_ms - call.start_ms for call in forward] == pytest.approx([1.0] * LAYERS, abs=0.05)
    assert [call.end_ms - call.start_ms for call in backward] == pytest.approx([2.0] * LAYERS, abs=0.05)
    assert step.step_ms == pytest.approx(3 * LAYERS + 0.1, abs=0.2)


def test_stalls_are_all_that_compute_waited_and_say_for_what() -> None:
    step, waited_ms = recorded(Training(goal=EVERYTHING, link_bytes_per_ms=2500))
    assert waited_ms > 1
    assert step.stalled_ms == pytest.approx(waited_ms)
    assert {stall.cause for stall in step.stalls} == {"release"}
    starved, waited_ms = recorded(Training(plan=Plan(release_window_bytes=0, prefetch_window_bytes=0)))
    assert starved.stalled_ms == pytest.approx(waited_ms)
    assert {stall.cause for stall in starved.stalls} == {"release", "reload"}
    assert sum(storage.late for storage in starved.storages) >= LAYERS - 1
    units = {storage.unit for storage in starved.storages}
    assert {stall.unit for stall in starved.stalls} == units


def test_a_step_is_recorded_while_a_settled_plan_marks_few_rounds() -> None:
    training = Training(goal=PlanGoal(max_overhead=0.1), link_bytes_per_ms=2500)
    step, _ = recorded(training, rounds=21)
    plain = recorded(Training(goal=None, plan=Plan(release_window_bytes=0), link_bytes_per_ms=2500))[0]
    assert len(step.calls) == len(plain.calls) == 2 * LAYERS
    assert step.memory
    told = training.offloader.rounds.planned
    assert sum(s.bytes for s in step.storages if s.d2h) == told.copied_bytes < told.saved_bytes


def test_what_is_dropped_without_backward_is_freed_and_does_not_come_back() -> None:
    training = Training(goal=EVERYTHING, link_bytes_per_ms=20000)
    seen: list[StepRecording] = []
    training.offloader._transfer.recorder.show(seen.append)
    x = torch.linspace(0.9, 1.1, LAYER_BYTES // 4).requires_grad_()
    training.model(x)  # the graph is gone at once
    training.streams.work(5.0)
    training.streams.read()
    for _ in range(2):
        training.step()
    training.offloader.stats()
    (step,) = seen
    assert [storage.h2d for storage in step.storages] == [None] * LAYERS
    assert all(storage.freed_ms < step.step_ms - 4 for storage in step.storages)
    assert not any(call.backward for call in step.calls)


def test_a_round_in_which_nothing_happens_is_no_step() -> None:
    training = Training(goal=EVERYTHING)
    seen: list[StepRecording] = []
    training.offloader._transfer.recorder.show(seen.append)
    training.offloader.begin_micro_batch()
    for _ in range(3):
        training.step()
    (step,) = seen
    assert len(step.storages) == LAYERS
    assert step.calls[0].start_ms < 0.2  # counted from where the step with something in it began


def test_waits_that_begin_together_are_one_after_the_other() -> None:
    at_ms = [Fence("compute", n, Event(ms)) for n, ms in enumerate((1.0, 3.0, 4.0, 2.0))]
    begin, *ends = at_ms
    waits = [Wait(1, begin, end, UnitStats(), at_death=False) for end in ends]
    assert wait_spans(waits, lambda fence: float(fence.event)) == [(1.0, 3.0), (3.0, 4.0), (4.0, 4.0)]


def test_rounds_that_nobody_wants_to_see_keep_nothing_for_it() -> None:
    training = Training(goal=EVERYTHING)
    training.steady()
    recorder = training.offloader._transfer.recorder
    assert recorder._round.deaths == {}
    assert {copy.block for copies in recorder._round.copies.values() for copy in copies} == {None}
    assert recorder._round.begin is None


class Net(nn.Module):
    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(streams, 1.0) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimulatedStreams:
    made = SimulatedStreams(5000.0)
    pool = HostPool(HostPoolSettings(1 << 30, pin_memory=False), slab_bytes=1 << 12)
    monkeypatch.setattr(api, "transfer_on", lambda device: Transfer(made))
    monkeypatch.setattr(api, "host_pool", lambda: pool)  # that of the process stays for real devices
    return made


def train(net: Net, streams: SimulatedStreams) -> torch.Tensor:
    x = torch.linspace(0.9, 1.1, LAYER_BYTES // 4).requires_grad_()
    streams.work(0.1, x)
    net(x).sum().backward()
    streams.read()
    return x.grad


SECTION = {"modules": ["layers.*"], "min_tensor_bytes": 0, "host_pool": {"pin_memory": False}}


def test_the_file_is_written_when_the_device_has_passed_the_step(streams: SimulatedStreams, tmp_path: Path) -> None:
    net = Net(streams)
    expected = train(net, streams)
    offload = ds_fgoffload.attach(net, {**SECTION, "policy": "all"})
    for _ in range(6):
        train(net, streams)
    path = tmp_path / "step.json"
    offload.record(path)
    assert torch.equal(train(net, streams), expected)
    assert not path.exists()
    train(net, streams)
    assert not path.exists()  # the host was ahead of the device when this step began
    offload.stats()
    step = StepRecording.read(path)
    offload.detach()
    assert StepRecording.read(path) == step
    assert step.title == "One step of Net"
    assert {storage.unit for storage in step.storages} == {f"layers.{n}" for n in range(LAYERS)}
    assert step.facts["plan"].startswith("planned: 31.2 KiB of 31.2 KiB a round are copied, ")
    assert "layers.{0..7}" in page(step)


def test_the_last_step_is_written_when_offloading_ends(streams: SimulatedStreams, tmp_path: Path) -> None:
    net = Net(streams)
    offload = ds_fgoffload.attach(net, SECTION)
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    offload.record(first, title="mine")
    offload.record(second)
    train(net, streams)
    offload.detach()
    mine = StepRecording.read(first)
    assert mine.title == "mine"
    assert replace(mine, title="One step of Net") == StepRecording.read(second)
    with pytest.raises(OffloadStateError, match="nothing is offloaded here"):
        offload.record(first)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr("ds_fgoffload.reporting.step_file.warn_here", said.append)
    return said


def test_what_cannot_be_recorded_is_said(streams: SimulatedStreams, tmp_path: Path, warnings: list[str]) -> None:
    net = Net(streams)
    offload = ds_fgoffload.attach(net, SECTION)
    train(net, streams)
    for path in (tmp_path / "no" / "step.json", tmp_path):
        with pytest.raises(OffloadStateError, match="cannot write"):
            offload.record(path)
    assert warnings == []
    offload.record(tmp_path / "never.json")
    offload.detach()
    assert [said.endswith("never.json was not written: no step has begun since it was asked for") for said in warnings]
    assert len(warnings) == 1


def test_a_file_that_cannot_be_written_does_not_end_the_training(
    streams: SimulatedStreams, tmp_path: Path, warnings: list[str]
) -> None:
    net = Net(streams)
    offload = ds_fgoffload.attach(net, SECTION)
    folder = tmp_path / "gone"
    folder.mkdir()
    offload.record(folder / "step.json")
    folder.rmdir()
    train(net, streams)
    train(net, streams)
    offload.detach()
    assert len(warnings) == 1
    assert "step.json: No such file" in warnings[0]


def test_on_a_cpu_there_is_nothing_to_record(tmp_path: Path) -> None:
    offload = ds_fgoffload.attach(nn.Sequential(nn.Linear(4, 4)), {"modules": ["0"]})
    with pytest.raises(OffloadStateError, match="on cpu copies are made at once"):
        offload.record(tmp_path / "step.json")
    offload.detach()
