"""Scripts that know nothing of this package, run by ``ds_fgoffload.run``: under real launchers, and in this process."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import deepspeed
import pytest
import torch.distributed
from deepspeed.utils import logger

from ds_fgoffload import run
from ds_fgoffload.reporting import tally
from tests.helpers.distributed import one_rank

REPOSITORY = Path(__file__).resolve().parent.parent

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 0},  # under ZeRO 1-3 DeepSpeed itself keeps engines alive that were not destroyed
}
SECTION = {"modules": ["fc2"], "min_tensor_bytes": 0}
SAVED_BYTES = 2 * 8 * 4
"""What ``fc2`` saves in a step: its input, two rows of eight."""

TRAINING = """
    import gc
    import sys
    import deepspeed
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc2(nn.functional.gelu(self.fc1(x))).sum()

    def train(initialize, config, steps=1):
        net = Net()
        engine, *_ = initialize(model=net, model_parameters=net.parameters(), config=config)
        for _ in range(steps):
            engine.backward(engine(torch.ones(2, 4)))
            engine.step()
        return engine

    config = sys.argv[sys.argv.index("--config") + 1]
"""
NO_BUILD = """
    import deepspeed.ops
    deepspeed.ops.__compatible_ops__ = {}  # DeepSpeed would build an op with a C++ compiler
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a script out of indented pieces."""

    def write_script(name: str, *pieces: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(dedent(piece) for piece in pieces))
        return path

    return write_script


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**CONFIG, "fine_grained_offload": SECTION}))
    return path


def launch(*command: str, folder: Path, stats: Path) -> str:
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        run.STATS_FILE_VARIABLE: str(stats),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def free_port() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


def check_counts(counts: list[dict[str, Any]], saved_bytes: dict[tuple[int, int], int]) -> None:
    """The counts are there for each engine and rank, and each saved, offloaded and reloaded just what is given."""
    assert {(entry["engine"], entry["rank"]): entry["saved_bytes"] for entry in counts} == saved_bytes
    for entry in counts:
        assert entry["offloaded_bytes"] == entry["reloaded_bytes"] == entry["saved_bytes"]
        assert entry["units"]["fc2"]["saved_bytes"] == entry["saved_bytes"]
        assert entry["kept_bytes"] == 0
        assert entry["late_reloads"] >= 0
        assert entry["pool_peak_leased_bytes"] >= SAVED_BYTES


@pytest.mark.ranks
def test_deepspeed_launcher(tmp_path: Path, write: Callable[..., Path], config: Path) -> None:
    """The engine is gone and the process group destroyed when the script ends; the report is there all the same."""
    script = write(
        "deep/train_it.py",
        NO_BUILD,
        TRAINING,
        """
        import argparse
        from deepspeed import initialize

        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, required=True)
        parser.add_argument("--config")
        parser.add_argument("--word")
        arguments = parser.parse_args()
        engine = train(initialize, arguments.config, steps=2)
        print(f"rank {torch.distributed.get_rank()} has {arguments.local_rank} {arguments.word} {__name__}", flush=True)
        del engine
        gc.collect()
        torch.distributed.destroy_process_group()
        sys.exit(0)
        """,
    )
    stats = tmp_path / "stats.json"
    port = ["--master_port", free_port()]
    arguments = [str(script), "--config", str(config), "--word", "hello"]
    launcher = ["deepspeed.launcher.runner", "--num_gpus", "2", *port, "--module", "ds_fgoffload.run"]
    output = launch(*launcher, *arguments, folder=tmp_path, stats=stats)
    for rank in range(2):
        assert f"rank {rank} has {rank} hello __main__" in output
    assert output.count("bytes since attaching") == 1
    check_counts(json.loads(stats.read_text()), {(0, 0): 2 * SAVED_BYTES, (0, 1): 2 * SAVED_BYTES})


@pytest.mark.full
@pytest.mark.ranks
def test_torchrun_with_a_module_and_two_engines(tmp_path: Path, write: Callable[..., Path], config: Path) -> None:
    """Neither engine is collected, one is destroyed, and the script ends by running out."""
    write("package/__init__.py", "")
    write(
        "package/train_it.py",
        NO_BUILD,
        TRAINING,
        """
        actor = train(deepspeed.initialize, config, steps=1)
        critic = train(deepspeed.initialize, config, steps=3)
        actor.destroy()
        """,
    )
    config.write_text(config.read_text().replace('"stage": 0', '"stage": 2'))
    stats = tmp_path / "stats.json"
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(), "-m"]
    script = ["ds_fgoffload.run", "-m", "package.train_it", "--config", str(config)]
    output = launch(*launcher, *script, folder=tmp_path, stats=stats)
    assert output.count("bytes since attaching") == 2
    check_counts(json.loads(stats.read_text()), {(e, r): (1, 3)[e] * SAVED_BYTES for e in (0, 1) for r in (0, 1)})


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Lets scripts change what they like; returns the file that gets the counts."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(tally, "_tallies", [])
    monkeypatch.setattr(tally, "_switched_off", False)
    monkeypatch.setenv(run.STATS_FILE_VARIABLE, str(tmp_path / "stats.json"))
    return tmp_path / "stats.json"


@pytest.fixture
def rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda message, *_args, **_kwargs: said.append(str(message)))
    return said


def boards() -> list[run._Board]:
    """The boards of two ranks."""
    store = torch.distributed.HashStore()
    made = [run._Board(), run._Board()]
    for rank, board in enumerate(made):
        board.rank, board._ranks, board._store = rank, 2, store
    return made


def test_rank_0_gets_what_the_others_left_behind(warnings: list[str]) -> None:
    first, second = boards()
    second.gather("theirs")
    assert first.gather("mine") == ["mine", "theirs"]
    assert warnings == []


def test_a_rank_that_leaves_nothing_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setattr(run, "_PATIENCE", timedelta(milliseconds=10))
    first, _ = boards()
    assert first.gather("mine") == ["mine"]
    assert len(warnings) == 1
    assert "rank 0 tells its own counts only" in warnings[0]


SEEN = """
    import sys, json, pathlib, deepspeed
    seen = pathlib.Path(__file__).with_name("seen.json")
    seen.write_text(json.dumps([__name__, sys.argv, sys.path[0], deepspeed.initialize.__doc__]))
"""


def test_a_script_sees_what_python_would_show_it(
    write: Callable[..., Path], in_this_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write("deep/script.py", SEEN)
    original = deepspeed.initialize
    monkeypatch.chdir(script.parent.parent)
    run.main(["--local_rank=1", "deep/script.py", "--flag", "value", "--local_rank=7"])
    name, argv, first_path, doc = json.loads(script.with_name("seen.json").read_text())
    assert name == "__main__"
    assert argv == ["deep/script.py", "--local_rank=1", "--flag", "value", "--local_rank=7"]
    assert first_path == str(script.parent)
    assert doc == original.__doc__
    assert deepspeed.initialize is original


def test_a_module_is_found_from_the_working_directory(
    write: Callable[..., Path], in_this_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write("some_package/some_module.py", SEEN)
    monkeypatch.chdir(script.parent.parent)
    run.main(["--local-rank=0", "-m", "some_package.some_module", "-x"])
    name, argv, first_path, _ = json.loads(script.with_name("seen.json").read_text())
    assert (name, first_path) == ("__main__", "")
    assert argv == [str(script), "--local-rank=0", "-x"]


@pytest.mark.parametrize("arguments", [[], ["--local_rank=0"], ["-m"], ["-x"], ["-m", "--local_rank=0"]])
def test_without_a_script_there_is_a_usage_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: deepspeed --module")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--local_rank=0", "--help"]])
def test_help_is_no_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(arguments) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: deepspeed --module")
    assert run.STATS_FILE_VARIABLE in said.out
    assert said.err == ""


def ends(arguments: list[str]) -> object:
    """The exit code."""
    with pytest.raises(SystemExit) as raised:
        run.main(arguments)
    return raised.value.code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch.py"], "error: there is no script nosuch.py in {}: give the path of one, or -m package.module"),
        (
            ["-m", "no_such"],
            "error: there is no module no_such, as seen from {}: give the name of one, or a script's path",
        ),
        (
            ["-m", "no.such"],
            "error: there is no module no.such, as seen from {}: give the name of one, or a script's path",
        ),
        (
            ["-m", "json.such"],
            "error: there is no module json.such, as seen from {}: give the name of one, or a script's path",
        ),
    ],
)
def test_a_script_that_is_not_there_is_told_in_a_sentence(
    in_this_process: Path, monkeypatch: pytest.MonkeyPatch, capsys, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(in_this_process.parent)
    original = deepspeed.initialize
    assert ends(arguments) == 2
    assert capsys.readouterr().err == said.format(in_this_process.parent) + "\n"
    assert deepspeed.initialize is original


def test_a_module_that_lacks_an_import_fails_as_it_fails(
    write: Callable[..., Path], in_this_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write("lacking/__init__.py", "import no_such_package_anywhere")
    write("lacking/train.py", "")
    monkeypatch.chdir(script.parent.parent)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        run.main(["-m", "lacking.train"])


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"modules": ["fc3"], "min_tensor_bytes": 0}, 'pattern "fc3" matches no module'),
        ({"module": ["fc2"]}, "module"),
    ],
)
def test_an_error_in_the_section_is_told_in_a_sentence(
    write: Callable[..., Path], in_this_process: Path, rank: None, config: Path, capsys, section: Any, said: str
) -> None:
    config.write_text(json.dumps({**CONFIG, "fine_grained_offload": section}))
    script = write("script.py", TRAINING, "train(deepspeed.initialize, config)")
    assert ends([str(script), "--config", str(config)]) == 2
    error = capsys.readouterr().err
    last = error[error.index("error: ") :]
    assert said in last
    assert "Traceback" not in error


FAILS = """
    engine = train(deepspeed.initialize, config)
    engine(torch.ones(2, 4))
    raise torch.OutOfMemoryError("no more")
"""


def test_a_rank_that_fails_tells_its_own_counts_and_asks_nobody(
    write: Callable[..., Path], in_this_process: Path, rank: None, config: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run._Board, "gather", lambda *_: pytest.fail("the others may be gone"))
    script = write("script.py", TRAINING, FAILS)
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        run.main([str(script), "--config", str(config)])
    output = capsys.readouterr().out
    assert "rank 0 ends by OutOfMemoryError; its own counts until then:\n" in output
    assert [cell.strip() for cell in row_of("fc2", output)[1:5]] == ["0", "fc2", "2", f"{2 * SAVED_BYTES} B"]


def row_of(unit: str, output: str) -> list[str]:
    return next(line for line in output.splitlines() if f" {unit} " in line).split("│")


@pytest.mark.parametrize("fails", ["counting", "nothing was counted"])
def test_what_the_script_raised_goes_its_way(
    write: Callable[..., Path],
    in_this_process: Path,
    rank: None,
    config: Path,
    capsys,
    warnings,
    monkeypatch,
    fails: str,
) -> None:
    if fails == "counting":
        monkeypatch.setattr(tally.Tally, "counts", lambda *_: 1 / 0)
    steps = int(fails == "counting")
    script = write(
        "script.py", TRAINING, f"engine = train(deepspeed.initialize, config, steps={steps})", "raise KeyError(3)"
    )
    with pytest.raises(KeyError, match="3"):
        run.main([str(script), "--config", str(config)])
    assert "bytes since attaching" not in capsys.readouterr().out
    told = [line for line in warnings if "no counts, as ZeroDivisionError was raised" in line]
    assert len(told) == steps


@pytest.mark.parametrize(("steps", "times"), [(2, 1), (3, 2)])
def test_a_report_is_not_printed_again_unless_there_is_more_to_tell(
    write: Callable[..., Path], in_this_process: Path, rank: None, config: Path, capsys, steps: int, times: int
) -> None:
    section = {**SECTION, "report_after_steps": 2}
    config.write_text(json.dumps({**CONFIG, "fine_grained_offload": section}))
    script = write("script.py", TRAINING, f"engine = train(deepspeed.initialize, config, steps={steps})")
    run.main([str(script), "--config", str(config)])
    assert capsys.readouterr().out.count("bytes since attaching") == times
    check_counts(json.loads(in_this_process.read_text()), {(0, 0): steps * SAVED_BYTES})


def test_where_the_table_cannot_be_printed_it_is_in_ascii(
    write: Callable[..., Path], in_this_process: Path, rank: None, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    config.write_text(json.dumps({**CONFIG, "fine_grained_offload": {**SECTION, "report_after_steps": 1}}))
    script = write("script.py", TRAINING, "engine = train(deepspeed.initialize, config, steps=2)")
    run.main([str(script), "--config", str(config)])
    sys.stdout.flush()
    assert output.getvalue().count(b"| fc2       |") == 2


@pytest.mark.parametrize(("end", "error"), [("sys.exit(3)", SystemExit), ("raise KeyError(3)", KeyError)])
def test_a_script_fails_as_it_fails(
    write: Callable[..., Path], in_this_process: Path, end: str, error: type[BaseException]
) -> None:
    original = deepspeed.initialize
    script = write("script.py", "import sys", end)
    with pytest.raises(error, match="3"):
        run.main([str(script)])
    assert deepspeed.initialize is original
    assert not in_this_process.exists()


def test_a_section_that_is_switched_off_is_told_so(
    write: Callable[..., Path], in_this_process: Path, rank: None, warnings: list[str]
) -> None:
    config = in_this_process.with_name("ds_config.json")
    config.write_text(json.dumps({**CONFIG, "fine_grained_offload": {**SECTION, "enabled": False}}))
    run.main([str(write("script.py", TRAINING, "train(deepspeed.initialize, config)")), "--config", str(config)])
    assert [line for line in warnings if "fine_grained_offload" in line] == [
        'fine_grained_offload: nothing was offloaded, since "enabled" is false'
    ]


def test_counts_that_cannot_be_written_fail_no_training(
    write: Callable[..., Path], in_this_process: Path, rank: None, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run.STATS_FILE_VARIABLE, str(in_this_process.parent / "no_such_folder" / "stats.json"))
    config = in_this_process.with_name("ds_config.json")
    config.write_text(json.dumps({**CONFIG, "fine_grained_offload": SECTION}))
    run.main([str(write("script.py", TRAINING, "train(deepspeed.initialize, config)")), "--config", str(config)])
    assert [line for line in warnings if f"{run.STATS_FILE_VARIABLE}: the counts are not written" in line]


def test_counts_go_where_the_script_began(
    write: Callable[..., Path], in_this_process: Path, rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run.STATS_FILE_VARIABLE, in_this_process.name)
    monkeypatch.chdir(in_this_process.parent)
    config = in_this_process.with_name("ds_config.json")
    config.write_text(json.dumps({**CONFIG, "fine_grained_offload": SECTION}))
    script = write("script.py", TRAINING, "train(deepspeed.initialize, config)", "import os; os.chdir('/')")
    run.main([str(script), "--config", str(config)])
    assert len(json.loads(in_this_process.read_text())) == 1


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(0)"])
def test_a_script_without_the_section_is_told_so(
    write: Callable[..., Path], in_this_process: Path, rank: None, warnings: list[str], end: str
) -> None:
    config = in_this_process.with_name("ds_config.json")
    config.write_text(json.dumps(CONFIG))
    script = write("script.py", TRAINING, "train(deepspeed.initialize, config)", end)
    run.main([str(script), "--config", str(config)])
    assert [line for line in warnings if "fine_grained_offload" in line] == [
        "fine_grained_offload: nothing was offloaded, since no engine was made with a fine_grained_offload section: "
        "the section belongs into the configuration that the script gives DeepSpeed"
    ]
    assert json.loads(in_this_process.read_text()) == []


@pytest.mark.parametrize(
    "end",
    {
        "alive": "engine = train(deepspeed.initialize, config)",
        "local": "train(deepspeed.initialize, config); gc.collect()",
        "local, not collected": "gc.disable(); train(deepspeed.initialize, config)",
        "destroyed": "engine = train(deepspeed.initialize, config); engine.destroy()",
        "initialized by name": "from deepspeed import initialize; engine = train(initialize, config)",
        "knows of us": "import ds_fgoffload; engine = train(ds_fgoffload.initialize, config)",
        "without group": "train(deepspeed.initialize, config); deepspeed.comm.destroy_process_group()",
        "exits": "engine = train(deepspeed.initialize, config); sys.exit(0)",
    }.values(),
)
def test_the_report_is_there_whatever_became_of_the_engine(
    write: Callable[..., Path],
    in_this_process: Path,
    rank: None,
    config: Path,
    capsys: pytest.CaptureFixture[str],
    end: str,
) -> None:
    script = write("script.py", TRAINING, end)
    run.main([str(script), "--config", str(config)])
    check_counts(json.loads(in_this_process.read_text()), {(0, 0): SAVED_BYTES})
    assert capsys.readouterr().out.count("bytes since attaching") == 1
