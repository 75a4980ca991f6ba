"""One import puts offloading in; and what each step moved goes to DeepSpeed's monitors."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from distributed import one_rank
from torch import nn

import ds_fgoffload

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
