"""The command line: what is asked for comes out, and what is wrong is said with its remedy."""

from __future__ import annotations

import json
import logging
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils import logger
from torch.optim.optimizer import _global_optimizer_post_hooks
from typer.testing import CliRunner

import ds_fgoffload
from ds_fgoffload.cli import doctor, inspect
from ds_fgoffload.cli import main as cli
from ds_fgoffload.cli.doctor import Finding, Verdict
from ds_fgoffload.cli.random_model import RandomModel
from ds_fgoffload.config import find_section, parse_config
from ds_fgoffload.device.streams import SynchronousStreams
from ds_fgoffload.errors import OffloadConfigError, OffloadStateError
from tests.helpers.distributed import one_rank

TINY = [
    f"--set={setting}"
    for setting in (
        "vocab_size=64", "hidden_size=32", "intermediate_size=96", "num_hidden_layers=2", "num_attention_heads=4",
        "num_key_value_heads=2", "bos_token_id=1", "eos_token_id=2", "pad_token_id=0",
    )
]  # fmt: skip
LLAMA = ["inspect", "--transformers", "llama", *TINY, "--tokens", "16", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_console", lambda: cli.Console(width=200))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_help_names_every_command_and_how_to_call_it() -> None:
    assert {"inspect", "doctor"} <= set(run("--help").split())
    assert "ds-fgoffload inspect train.py --deepspeed_config ds_config.json" in run("inspect", "--help")


def test_usage_names_the_script_and_its_arguments() -> None:
    assert "inspect [OPTIONS] [SCRIPT [ARGS]...]" in run("inspect", "--help")


def test_the_version_is_told() -> None:
    assert run("--version") == f"ds-fgoffload {ds_fgoffload.__version__}\n"


def test_the_package_can_be_run_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "--version"])
    with pytest.raises(SystemExit) as raised:
        runpy.run_module("ds_fgoffload", run_name="__main__")
    assert raised.value.code == 0
    assert capsys.readouterr().out.startswith("ds-fgoffload ")


def test_a_model_of_transformers_as_a_tree(tmp_path: Path) -> None:
    output = run(*LLAMA, "--min-tensor-bytes", "0", "-p", "*.o_proj", "--depth", "3")
    assert "llama: one micro-batch saves" in output
    assert re.search(r"\{0,1\}\s+LlamaDecoderLayer x2", output)
    assert "down_proj" not in output[: output.index("these patterns")]
    assert re.search(r"\*\.o_proj\s+2\s+2\s+4.0 KiB", output)
    snippets = re.findall(r"^\{\n.*?^\}", output, re.DOTALL | re.MULTILINE)
    assert snippets
    for snippet in snippets:
        assert parse_config(find_section(json.loads(snippet))).enabled


def test_the_same_as_json(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "inventory.json"
    run(*LLAMA, "--min-tensor-bytes", "1KiB", "--json", str(file))
    found = json.loads(file.read_text())
    assert found["eligible_bytes"] == sum(s["bytes"] for s in found["storages"] if s["stays_because"] is None)
    tokens, hidden, wide = 16, 32, 96
    assert found["modules"]["model.layers.1.mlp.down_proj"] == {
        "class": "Linear",
        "calls": 1,
        "bytes": tokens * wide * 4,
        "storages": 1,
        "producers": {"mul": tokens * wide * 4},
    }
    assert found["patterns"]["@attn_proj"]["moved_bytes"] == 2 * tokens * hidden * 4
    assert found["patterns"]["@attn_proj"]["freed_bytes"] == 0  # attention saves its output, too
    assert found["suggestions"][0]["fine_grained_offload"]["min_tensor_bytes"] == "1KiB"


def test_checkpointing_leaves_the_inputs_of_the_layers(tmp_path: Path) -> None:
    file = tmp_path / "inventory.json"
    run(*LLAMA, "--min-tensor-bytes", "0", "--checkpointing", "--json", str(file))
    modules = json.loads(file.read_text())["modules"]
    assert not any("self_attn" in name for name in modules)
    assert modules["model.layers.1"]["bytes"] >= 16 * 32 * 4


def test_nothing_large_enough_says_what_to_do() -> None:
    assert "the largest storage is" in run(*LLAMA)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([*LLAMA[:2], "no_such_family"], OffloadConfigError, "allowed: a model type such as qwen3, or a config.json"),
        (
            [*LLAMA, "--dtype", "fp99"],
            OffloadConfigError,
            "^--dtype fp99: allowed: bfloat16, float16, float32",
        ),
        ([*LLAMA, "-p", "*.mlpp"], OffloadConfigError, "matches no module"),
        (["inspect", "-m"], OffloadStateError, "no script to run"),
    ],
)
def test_errors_of_users(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(*arguments)


def test_a_pattern_that_selects_nothing_costs_nothing_of_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "inventory.json"
    with pytest.raises(OffloadConfigError, match="matches no module"):
        run(*LLAMA, "-p", "*.mlpp", "-p", "model.layers.*.mlp.act_fn", "--min-tensor-bytes", "0", "--json", str(file))
    assert "model.layers.*.mlp.act_fn" in json.loads(file.read_text())["patterns"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("qwn3", "no such model type (nearest: qwen3, "),
        ("vit", "transformers has no causal language model for it"),
    ],
)
def test_of_all_the_model_types_only_the_nearest_are_named(source: str, message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(OffloadConfigError, match=re.escape(message)) as raised:
        run("inspect", "--transformers", source)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "give a script"),
        ([*LLAMA, "train.py"], "give a script or --transformers, not both: got train.py too"),
        ([*LLAMA, "--set", "nothing"], "allowed: KEY=VALUE"),
        ([*LLAMA, "--min-tensor-bytes", "many"], "allowed: a whole number"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("arguments", [["inspect", "--json"], ["draw", "--sample", "--out"]])
@pytest.mark.parametrize(
    ("file", "message"), [("nodir/x", "there is no folder nodir; make it"), ("folder", "is a folder; give the path")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path, monkeypatch, arguments, file, message
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(cli.app, [*arguments, file, *(["no.py"] if arguments[0] == "inspect" else [])])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_trace_that_cannot_be_written_is_refused_before_the_page(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli.app, ["draw", "--sample", "--trace", "nodir/t.json"]).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_disk_that_has_no_room_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "draw", "--sample", "--out", "/dev/full"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.startswith("error: /dev/full cannot be written: No space left")


def test_a_command_without_a_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "doctor", "--no-measure"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    sys.stdout.close()
    assert raised.value.code in {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["num_hidden_layers=abc"], "num_hidden_layers"),
        (["num_hidden_layers=-1"], "num_hidden_layers"),
        (["num_attention_heads=0"], "ZeroDivisionError: "),
        (["vocab_size=0", "pad_token_id=null"], "see whether a key given with --set caused it"),
    ],
)
def test_settings_that_no_model_can_have(monkeypatch, capsys, arguments, message) -> None:
    pytest.importorskip("transformers")
    pairs = [f"--set={pair}" for pair in arguments]
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", *LLAMA[:2], "qwen3", *LLAMA[3:], *pairs])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    err = capsys.readouterr().err
    assert raised.value.code == 1
    assert err.splitlines()[-1].startswith("error: --transformers qwen3: ")
    assert message in err.splitlines()[-1]


def test_more_tokens_than_the_model_has_positions(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("transformers")
    settings = ("n_layer=1", "n_embd=24", "vocab_size=64", "n_positions=8", "bos_token_id=1", "eos_token_id=2")
    pairs = [f"--set={setting}" for setting in settings]
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "inspect", "--transformers", "gpt2", *pairs, "--tokens", "9"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "the model has 8 positions, and --tokens is 9; give it fewer" in capsys.readouterr().err.splitlines()[-1]


def test_errors_are_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "--local_rank=0", *LLAMA[:2], "no_such_family"])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 1
    assert capsys.readouterr().err.lstrip().splitlines()[-1].startswith("error: --transformers no_such_family:")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "num_hidden_layer=1"], 'has no "num_hidden_layer"; did you mean "num_hidden_layers"?'),
        (["--set", "num_hidden_layers=1", "--set", f"vocab_size={1 << 40}"], "weights and gradients take"),
    ],
)
def test_a_model_that_was_not_meant_is_refused_before_it_takes_memory(arguments, message, monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "inspect", "--transformers", "llama", *arguments])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 1
    assert message in capsys.readouterr().err


SCRIPT = """
    import sys, deepspeed, torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc2(nn.functional.gelu(self.fc1(x))).sum()

    net = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "fine_grained_offload": {"modules": ["fc2"], "min_tensor_bytes": 0},
    }
    engine, *_ = INITIALIZE(model=net, model_parameters=net.parameters(), config=config)
    for step in range(100):
        print("step", step, sys.argv[1])
        try:
            engine.backward(engine(torch.ones(2, 4)))
        except Exception:
            print("caught")
        engine.step()
    raise AssertionError("the script was to be ended")
"""


@pytest.fixture
def own_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's arguments and folder go when the test ends."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def _rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize("initialize", ["deepspeed.initialize", "__import__('ds_fgoffload').initialize"])
def test_a_script_runs_for_a_few_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, initialize: str, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train_it.py"
    script.write_text(dedent(SCRIPT).replace("INITIALIZE", initialize))
    file = tmp_path / "inventory.json"
    output = run(
        "inspect", "--micro-batches", "3", "--json", str(file), "--min-tensor-bytes", "0", str(script), "--flag"
    )
    assert [line for line in output.splitlines() if line.startswith("step")] == [f"step {n} --flag" for n in range(4)]
    assert "caught" not in output
    assert re.search(r"the script's fine_grained_offload section\s+1\s+1\s+64 B\s+64 B", output)
    found = json.loads(file.read_text())
    assert {name: module["bytes"] for name, module in found["modules"].items()} == {"fc1": 32, "": 64, "fc2": 64}


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize(
    ("written", "asked", "expected"),
    [
        ("48", [], (48, "the script's fine_grained_offload section")),
        ('"64B"', [], (64, "the script's fine_grained_offload section")),
        ("48", ["--min-tensor-bytes", "0"], (0, "--min-tensor-bytes")),
        ('"many"', [], (1 << 20, "the default, since the script's section has 'many', which is no size")),
    ],
)
def test_the_scripts_own_least_size_is_used(tmp_path, own_argv, written, asked, expected) -> None:
    script, file = tmp_path / "train_it.py", tmp_path / "inventory.json"
    text = dedent(SCRIPT).replace("INITIALIZE", "deepspeed.initialize")
    script.write_text(text.replace('"min_tensor_bytes": 0', f'"min_tensor_bytes": {written}'))
    output = run("inspect", "--json", str(file), *asked, str(script), "--flag")
    found = json.loads(file.read_text())
    assert (found["min_tensor_bytes"], found["min_tensor_bytes_from"]) == expected
    assert f"(min_tensor_bytes, {expected[1]})" in output


@pytest.mark.usefixtures("_rank")
def test_a_script_without_an_engine_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "nothing.py"
    script.write_text("print('hello')")
    with pytest.raises(OffloadStateError, match=r"nothing.py ended without calling deepspeed.initialize"):
        run("inspect", str(script))


WITHOUT_ENGINE = """
    import deepspeed, torch

    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(100):
        print("step", step)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.usefixtures("_rank", "own_argv")
def test_a_script_that_trains_without_an_engine_is_ended_early(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(dedent(WITHOUT_ENGINE))
    before = list(_global_optimizer_post_hooks)
    result = CliRunner().invoke(cli.app, ["inspect", "--micro-batches", "3", str(script)])
    assert isinstance(result.exception, OffloadStateError)
    assert "plain.py has done 5 optimizer steps and made no DeepSpeed engine" in str(result.exception)
    assert [line for line in result.output.splitlines() if line.startswith("step")] == [f"step {n}" for n in range(5)]
    assert list(_global_optimizer_post_hooks) == before


def test_steps_that_deepspeed_does_while_it_makes_an_engine_are_not_counted() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters())

    def original() -> tuple[object, ...]:
        for _ in range(100):
            optimizer.step()
        return SimpleNamespace(module=net), optimizer, None, None

    watch = inspect._Watch(2, inspect.Progress())
    with watch.optimizers_watched():
        watch.initialize(original)
        for _ in range(100):
            optimizer.step()
    assert watch.steps_without_engine == 0


def failing(where: str, error: str) -> str:
    """The script, with ``error`` raised in its second layer, its step, or with no engine yet."""
    text = dedent(SCRIPT).replace("INITIALIZE", "deepspeed.initialize").replace("except Exception", "except OSError")
    fail = f"raise {error}"
    old, new = {
        "forward": ("self.fc2(nn.functional.gelu(self.fc1(x)))", "fail(self.fc1(x).square())"),
        "step": ("engine.step()", "fail(0)"),
        "start": ("net = Net()", "fail(0)"),
    }[where]
    assert old in text
    return f"import torch\ndef fail(x):\n    {fail}\n" + text.replace(old, new)


OUT = "torch.OutOfMemoryError('out of memory. Tried to allocate 20.00 GiB')"
ADVICE = (
    "give it a shorter sequence, a smaller batch or fewer layers for this run (what is saved grows in proportion), or "
    "use --transformers config.json --set num_hidden_layers=2"
)
AFTER = f"error: the script ran out of device memory; what is shown was saved before that; {ADVICE}"
BEFORE = f"error: the script ran out of device memory before a micro-batch was over; {ADVICE}"


@pytest.mark.usefixtures("_rank", "own_argv")
@pytest.mark.parametrize(
    ("where", "error", "last", "shown"),
    [
        ("start", OUT, BEFORE, None),
        ("forward", OUT, BEFORE, "a part of one micro-batch saved"),
        (
            "step",
            OUT,
            f"error: the script ran out of device memory; what is shown was saved before that; {ADVICE}",
            "one",
        ),
        ("step", f"RuntimeError('wrapped') from {OUT}", AFTER, "one"),
        ("forward", "ValueError('no')", "error: the script raised ValueError before its micro-batches were over", None),
    ],
)
def test_a_script_that_raises(tmp_path, monkeypatch, capsys, where, error, last, shown) -> None:
    script, file = tmp_path / "train_it.py", tmp_path / "inventory.json"
    script.write_text(failing(where, error))
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "inspect", "--json", str(file), str(script), "--flag"])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 1
    out, err = capsys.readouterr()
    told = err[err.index("Traceback") :].splitlines()
    assert told[-1].startswith(last)
    files = [line.split('"')[1] for line in told if line.startswith('  File "')]
    assert set(files) == {str(script)}
    assert any(line.endswith(", in fail") for line in told)
    if shown is None:
        assert not file.exists()
        assert "saved for backward, by module" not in out
    else:
        incomplete = where == "forward"
        assert shown in out
        assert ("INCOMPLETE" in out) == incomplete == ("what each pattern" not in out)
        found = json.loads(file.read_text())
        assert bool(found["incomplete"]) == incomplete
        assert "fc1" in found["modules"]


@pytest.mark.usefixtures("_rank", "own_argv")
@pytest.mark.parametrize(
    ("old", "code", "exit_code", "last", "shown"),
    [
        ("net = Net()", "3", 3, "error: the script ended with exit code 3 before it made a DeepSpeed engine", False),
        ("net = Net()", "'why'", 1, "error: the script ended with exit code 1 before it made", False),
        ("for step in", "4", 4, "error: the script ended with exit code 4 before a forward with gradients", False),
        ("    engine.step()", "5", 5, "error: the script ended with exit code 5 before its micro-batches were", True),
    ],
)
def test_a_script_that_ends_with_an_exit_code(tmp_path, monkeypatch, capsys, old, code, exit_code, last, shown) -> None:
    script, file = tmp_path / "train_it.py", tmp_path / "inventory.json"
    indent = " " * (len(old) - len(old.lstrip()))
    text = dedent(SCRIPT).replace("INITIALIZE", "deepspeed.initialize")
    script.write_text(text.replace(old, f"{indent}sys.exit({code})\n{old}"))
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "inspect", "--json", str(file), str(script), "--flag"])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    out, err = capsys.readouterr()
    assert raised.value.code == exit_code
    assert err.splitlines()[-1].startswith(last)
    assert file.exists() == ("one micro-batch saves" in out) == shown
    assert ("why" in err.splitlines()) == (code == "'why'")


@pytest.mark.usefixtures("_rank", "own_argv")
def test_a_script_that_answers_its_end_with_an_exit_code_is_no_failure(tmp_path) -> None:
    script = tmp_path / "train_it.py"
    text = dedent(SCRIPT).replace("INITIALIZE", "deepspeed.initialize")
    script.write_text(
        text.replace("except Exception:", "except BaseException:").replace('print("caught")', "sys.exit(1)")
    )
    assert "one micro-batch saves" in run("inspect", str(script), "--flag")


@pytest.mark.usefixtures("_rank", "own_argv")
def test_an_interrupted_script(tmp_path, monkeypatch, capsys) -> None:
    script = tmp_path / "train_it.py"
    script.write_text("raise KeyboardInterrupt")
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "inspect", str(script)])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 130
    assert capsys.readouterr().err.split() == ["interrupted"]


@pytest.mark.usefixtures("_rank", "own_argv")
def test_json_has_the_standard_output_for_itself(tmp_path, monkeypatch, capsys) -> None:
    script = tmp_path / "train_it.py"
    log = "from deepspeed.utils import logger\nlogger.warning('logged')\n"
    script.write_text(log + dedent(SCRIPT).replace("INITIALIZE", "deepspeed.initialize"))
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "inspect", "--json", "-", str(script), "--flag"])
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    with pytest.raises(SystemExit):
        cli.main()
    logger.removeHandler(handler)
    out, err = capsys.readouterr()
    assert "fc1" in json.loads(out)["modules"]
    assert "step 0 --flag" in err.splitlines()
    assert "logged" in err
    assert handler.stream is sys.stdout


@pytest.mark.usefixtures("_rank", "own_argv")
def test_a_folder_is_no_script(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "inspect", str(tmp_path)])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.splitlines() == [
        f"error: {tmp_path} is a folder without a __main__.py: give the path of a script in it"
    ]


@pytest.mark.usefixtures("_rank", "own_argv")
def test_a_setting_that_is_wrong_is_told_without_the_script(tmp_path, monkeypatch, capsys) -> None:
    script = tmp_path / "train_it.py"
    text = dedent(SCRIPT).replace("INITIALIZE", "__import__('ds_fgoffload').initialize")
    script.write_text(text.replace('"fc2"]', '"fc3"]'))
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "inspect", str(script)])
    with pytest.raises(SystemExit):
        cli.main()
    err = capsys.readouterr().err
    assert 'pattern "fc3" matches no module' in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.usefixtures("_rank", "own_argv")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such.py", "--flag"], "error: there is no script no_such.py in "),
        (["-m", "no_such_module"], "error: there is no module no_such_module"),
    ],
)
def test_a_script_that_is_not_there(monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", "inspect", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith(message)
    assert "File " not in err


def test_how_much_is_run_is_told_before_it_is(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    transformers = pytest.importorskip("transformers")
    told_before = []

    def build(*_arguments: object, **_keywords: object) -> None:
        if torch.get_default_device().type == "meta":
            return original(*_arguments, **_keywords)
        told_before.append(capsys.readouterr().err)
        raise ValueError("far enough")

    original = transformers.AutoModelForCausalLM.from_config
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", build)
    with pytest.raises(OffloadConfigError, match="far enough"):
        cli.app([*LLAMA, "--batch", "3"], standalone_mode=False)
    weights = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 2 * 32) + 32
    size = f"{weights * 4 / 1024:.1f} KiB"
    assert told_before == [f"llama: {weights} parameters, {size}; 2 micro-batches of 3 x 16 tokens on cpu\n"]


@pytest.mark.parametrize(
    ("tokens", "device", "hints"), [(4096, "cpu", True), (512, "cpu", False), (4096, "cuda", False)]
)
def test_many_tokens_on_a_cpu_are_advised_against(tokens: int, device: str, hints: bool) -> None:
    model = RandomModel("qwen3", {}, tokens, batch=1, dtype="float32", checkpointing=False)
    first, *hint = model.announced(1_234_000_000, 5 << 30, 2, torch.device(device))
    assert first == f"qwen3: 1.2 B parameters, 5.0 GiB; 2 micro-batches of {tokens} tokens on {device}"
    assert [("--tokens 512" in line) for line in hint] == [True] * hints


def test_each_micro_batch_is_told_of() -> None:
    pytest.importorskip("transformers")
    settings = dict(pair.removeprefix("--set=").split("=") for pair in TINY)
    model = RandomModel("llama", {key: int(value) for key, value in settings.items()}, 16, 1, "float32", False)
    told: list[str] = []
    inspect.inspect_transformers(model, 2, inspect.Progress(now=told.append))
    assert told[-2] == "micro-batch 1 of 2"
    assert re.fullmatch(r"micro-batch 2 of 2 \(the one before took \d+ s\)", told[-1])


def test_a_model_of_transformers_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    transformers = pytest.importorskip("transformers")

    def fail(*_args: object, **_kwargs: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", fail)
    monkeypatch.setattr(sys, "argv", ["ds-fgoffload", *LLAMA])
    with pytest.raises(SystemExit):
        cli.main()
    out, err = capsys.readouterr()
    assert "--tokens" in err.splitlines()[-1]
    assert "INCOMPLETE" in out
    assert "Traceback" not in err


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def gpu(root: Path, width: str) -> None:
    device = root / "sys/bus/pci/devices/0000:17:00.0"
    facts = {"class": "0x030200", "vendor": "0x10de", "current_link_speed": "16.0 GT/s PCIe", "max_link_width": "16"}
    for name, text in {**facts, "max_link_speed": "32.0 GT/s PCIe", "current_link_width": width}.items():
        write(device / name, f"{text}\n")


def finding(findings: list[Finding], name: str) -> Finding:
    return next(f for f in findings if f.name.startswith(name))


def test_the_doctor_finds_what_is_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    gpu(root, "8")
    write(root / "proc/self/cgroup", "0::/job\n")
    for name, text in {"memory.max": "1000000", "memory.current": "400000", "memory.stat": "inactive_file 0"}.items():
        write(root / "sys/fs/cgroup/job" / name, text)
    write(home / ".cache/torch_extensions/py311_cpu/deepspeed_shm_comm/lock", "")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    monkeypatch.setattr(doctor, "memlock_bytes", lambda: 8 << 20)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (8 << 20, doctor.resource.RLIM_INFINITY))
    findings = doctor.examine(measure=False, root=root, home=home)
    assert finding(findings, "torch").found == torch.__version__
    assert finding(findings, "cgroup").found.startswith("a memory limit leaves 585.9 KiB")
    assert finding(findings, "memlock").found == "8.0 MiB (hard limit: unlimited)"
    assert finding(findings, "/dev/shm").found == "not there"
    assert finding(findings, "PCIe 0000:17:00.0").found == "16.0 GT/s PCIe x8, at most 32.0 GT/s PCIe x16"
    assert finding(findings, "DS_PIN_MEMORY_BACKEND").verdict is Verdict.NOTE
    assert "deepspeed_shm_comm/lock is there" in finding(findings, "extension lock").found
    assert all(f.remedy for f in findings if f.verdict is not Verdict.OK)
    assert doctor.exit_code(findings) == 2


def test_the_doctor_finds_nothing_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    gpu(tmp_path, "16")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(doctor, "memlock_bytes", lambda: None)
    monkeypatch.setattr(doctor, "_share_bytes", lambda: 64 << 30)
    findings = [f for f in doctor.examine(measure=False, root=tmp_path, home=tmp_path) if f.name != "accelerator"]
    assert [f for f in findings if f.verdict is not Verdict.OK and f.name != "/dev/shm"] == []


def test_pinning_that_is_refused_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(doctor, "_pinned", refuse)
    (found,) = doctor._measured_on(SynchronousStreams(torch.device("cpu")), 1 << 20)
    assert found.verdict is Verdict.FAIL
    assert doctor.exit_code([found]) == 1
    assert doctor.exit_code([Finding("x", Verdict.OK, "")]) == 0


def test_a_device_has_its_link_measured_both_ways() -> None:
    found = list(doctor._measured_on(SynchronousStreams(torch.device("cpu")), 1 << 20))
    assert [f.name for f in found] == ["pinning", "link, device to host", "link, host to device"]
    assert all("GB/s" in f.found for f in found)


def test_a_cpu_alone_has_no_link_to_measure() -> None:
    (found,) = doctor._measured(torch.device("cpu"))
    assert found.found.startswith("nothing to measure")
    assert "GB/s" not in found.found


def test_an_old_package_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda package: "0.1")
    assert finding(list(doctor._versions()), "deepspeed") == Finding(
        "deepspeed", Verdict.FAIL, "0.1", "0.19.8 or newer is needed: pip install -U deepspeed"
    )


def test_the_doctors_command_measures_and_tells_by_its_exit_code() -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    found = json.loads(result.output[result.output.index("[\n") :])
    assert [f["found"] for f in found if f["name"].startswith("link")]
    assert "GB/s" not in result.output  # nothing is pinned or copied over a link here
    assert result.exit_code == 2  # no accelerator here
    text = CliRunner().invoke(cli.app, ["doctor", "--no-measure"]).output
    assert re.search(r"torch \.+\s+\[OK\]\s+" + re.escape(torch.__version__), text)
