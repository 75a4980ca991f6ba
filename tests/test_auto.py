"""One import puts offloading in; and what each step moved goes to DeepSpeed's monitors."""

from __future__ import annotations

import atexit
import csv
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import ds_fgoffload
from ds_fgoffload.reporting import tally
from ds_fgoffload.script import initialize_replaced
from ds_fgoffload.text import messages
from tests.helpers.distributed import one_rank

ROWS = 4
STEP_BYTES = ROWS * 8 * 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(x))).sum()


@pytest.fixture(autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "fine_grained_offload": {"modules": ["fc2"], "min_tensor_bytes": 0, **more.pop("section", {})},
        **more,
    }


def train(steps: int, **more: Any) -> Any:
    net = Net()
    engine, *_ = ds_fgoffload.initialize(model=net, model_parameters=net.parameters(), config=config(**more))
    for _ in range(2 * steps):
        engine.backward(engine(torch.ones(ROWS, 8)))
        engine.step()
    return engine


def test_the_import_puts_offloading_into_deepspeed_and_disable_takes_it_out() -> None:
    original = deepspeed.initialize
    from ds_fgoffload import auto

    try:
        auto.enable()
        once = deepspeed.initialize
        auto.enable()
        assert deepspeed.initialize is once is not original
        net = Net()
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
        assert ds_fgoffload.get(engine) is not None
        engine.destroy()
    finally:
        auto.disable()
    assert deepspeed.initialize is original
    auto.disable()
    assert deepspeed.initialize is original


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of a process in which deepspeed.initialize was not called and nothing attached to, at first."""
    warnings: list[str] = []
    monkeypatch.setattr(messages.logger, "warning", warnings.append)
    monkeypatch.setattr(deepspeed, "dist", None)
    monkeypatch.setattr(tally, "_tallies", [])
    monkeypatch.setattr(tally, "_switched_off", False)
    monkeypatch.setattr(atexit, "register", ends.append)
    ends.clear()
    return warnings


ends: list[Callable[[], None]] = []
"""What the interpreter would call at its end."""


@pytest.fixture
def auto() -> Iterator[Any]:
    """As if it were imported for the first time."""
    from ds_fgoffload import auto

    auto.disable()
    yield auto
    auto.disable()


FIRST = "import ds_fgoffload.auto first, before `from deepspeed import initialize`"


def initialize(with_function: Callable[..., Any], section: dict[str, Any] | None) -> None:
    net = Net()
    of_section = {} if section is None else {"fine_grained_offload": section}
    whole = {key: value for key, value in config().items() if key != "fine_grained_offload"} | of_section
    with_function(model=net, model_parameters=net.parameters(), config=whole)[0].destroy()


def test_an_import_after_the_engine_is_told(said: list[str], auto: Any) -> None:
    initialize(deepspeed.initialize, config()["fine_grained_offload"])
    auto.enable()
    assert len(said) == 1
    assert "imported after deepspeed.initialize was called" in said[0]
    assert FIRST in said[0]


def test_an_import_after_an_engine_that_is_attached_to_is_none(said: list[str], auto: Any) -> None:
    train(1).destroy()
    auto.enable()
    ends[0]()
    assert said == []


def test_an_import_after_the_function_was_taken_is_told(said: list[str], auto: Any, monkeypatch) -> None:
    script = ModuleType("train_it")
    script.start = deepspeed.initialize
    auto.enable()
    auto.disable()
    assert said == []
    monkeypatch.setitem(sys.modules, "train_it", script)
    auto.enable()
    assert len(said) == 1
    assert "train_it took `initialize` from deepspeed before ds_fgoffload.auto was imported" in said[0]
    assert FIRST in said[0]


def test_a_worker_that_imports_the_script_again_says_nothing(said: list[str], auto: Any, monkeypatch) -> None:
    script = ModuleType("train_it")
    script.start = deepspeed.initialize
    monkeypatch.setitem(sys.modules, "train_it", script)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the one that trains")
    auto.enable()
    ends[0]()
    assert said == []


def test_the_end_tells_if_nothing_was_offloaded(said: list[str], auto: Any, monkeypatch) -> None:
    original = deepspeed.initialize
    auto.enable()
    (end,) = ends
    end()
    assert said == []  # such as a data loader's worker
    initialize(original, config()["fine_grained_offload"])
    end()
    assert len(said) == 1
    assert messages.NOTHING_OFFLOADED in said[0]
    assert FIRST in said[0]
    assert "ds_fgoffload.get(engine)" in said[0]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    end()  # in a fork
    assert len(said) == 1


def test_a_worker_that_is_about_to_begin_says_nothing(said: list[str], auto: Any, monkeypatch) -> None:
    """A worker that was spawned does not know its parent yet while it imports the script."""
    script = ModuleType("train_it")
    script.start = deepspeed.initialize
    monkeypatch.setitem(sys.modules, "train_it", script)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    auto.enable()
    assert said == []


@pytest.mark.parametrize(
    ("section", "times"),
    [
        (None, 1),
        ({"modules": ["fc2"], "min_tensor_bytes": 0}, 0),
        ({"modules": ["fc2"], "enabled": False}, 0),
    ],
)
def test_the_end_is_silent_where_anything_was_attached_to(said: list[str], auto: Any, section, times: int) -> None:
    auto.enable()
    initialize(deepspeed.initialize, section)
    ends[0]()
    assert len(said) == times


def test_the_end_is_silent_after_an_error_that_the_user_reads(said: list[str], auto: Any, monkeypatch) -> None:
    monkeypatch.setattr(deepspeed, "dist", deepspeed.comm)
    monkeypatch.setattr(auto, "_warn_if_late", lambda _original: None)
    auto.enable()
    with pytest.raises(ds_fgoffload.OffloadConfigError):
        initialize(deepspeed.initialize, {"modules": ["fc3"]})
    ends[0]()
    assert said == []


def test_under_the_runner_it_is_the_runner_who_tells(said: list[str], auto: Any) -> None:
    with initialize_replaced(lambda original, *args, **kwargs: original(*args, **kwargs)):
        auto.enable()
        auto.disable()
    assert ends == said == []


def test_each_step_goes_to_the_monitors(tmp_path: Path) -> None:
    engine = train(3, csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    engine.destroy()
    files = {path.stem.removeprefix("Train_fine_grained_offload_"): path for path in tmp_path.rglob("*offload*.csv")}
    rows = list(csv.reader(files["offloaded_bytes"].read_text().splitlines()))[1:]
    assert [(int(step), float(number)) for step, number in rows] == [
        (2 * ROWS * step, 2 * STEP_BYTES) for step in (1, 2, 3)
    ]
    assert {"reloaded_bytes", "late_reloads", "kept_bytes", "held_bytes", "pool_pinned_bytes"} <= set(files)


@pytest.mark.parametrize(
    ("section", "times"), [({}, 0), ({"report_after_steps": 2}, 1), ({"report_after_steps": 0}, 0)]
)
def test_the_report_comes_after_the_first_steps(
    section: dict[str, Any], times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = train(4, section=section)
    output = capsys.readouterr().out
    engine.destroy()
    assert output.count("bytes since attaching") == times
    if times:
        row = next(line for line in output.splitlines() if "fc2" in line)
        assert [cell.strip() for cell in row.split("│")[1:4]] == ["0", "fc2", "4"]


def test_nothing_is_left_on_the_engine() -> None:
    engine = train(1)
    ds_fgoffload.get(engine).detach()
    assert "_take_model_step" not in vars(engine)
    engine.destroy()
