"""The Trainer of transformers, and TRL's with LoRA: the same bits with and without, and bytes that moved."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_fgoffload import attach, get
from ds_fgoffload.engines.adapter import engine_of
from ds_fgoffload.integrations.transformers import OffloadCallback
from ds_fgoffload.reporting.tally import tallies
from tests.helpers.distributed import Outcome, run_cases

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

HAS_TRL = all(importlib.util.find_spec(name) for name in ("trl", "peft", "datasets"))
STEPS = 2
LENGTH = 16
SECTION = {"modules": ["@mlp", "@attn"], "min_tensor_bytes": 0}
TEXT = Path(__file__).read_bytes()


def ds_config(stage: int, section: dict[str, Any] | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    return config | ({} if section is None else {"fine_grained_offload": section})


def tiny_llama() -> nn.Module:
    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def settings(folder: str, stage: int, section: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "deepspeed": ds_config(stage, section),
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }


def pieces() -> list[dict[str, list[int]]]:
    ids = [list(TEXT[start : start + LENGTH]) for start in range(0, 64 * LENGTH, LENGTH)]
    return [{"input_ids": piece, "labels": piece} for piece in ids]


def facts_of(trainer: Any, callback: OffloadCallback | None) -> dict[str, Any]:
    """Losses and a checksum of what was trained, and what moved."""
    trainer.train()
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        if parameter.requires_grad:
            whole = getattr(parameter, "ds_tensor", parameter)  # under ZeRO-3 this rank's part
            digest.update(name.encode() + whole.detach().float().numpy().tobytes())
    attachment = callback.attachment if callback else None
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": digest.hexdigest(),
        "offloaded": attachment.stats().offloaded_bytes if attachment else 0,
        "late": attachment.stats().late_reloads if attachment else 0,
        "live": attachment.stats().live_host_bytes if attachment else 0,
    }


def train_with_the_trainer(stage: int, section: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    callback = OffloadCallback() if section else None
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(**settings(folder, stage, section))
        trainer = transformers.Trainer(
            tiny_llama(), arguments, train_dataset=pieces(), callbacks=[callback] if callback else []
        )
        return facts_of(trainer, callback)


def train_with_trl(stage: int, section: dict[str, Any] | None) -> dict[str, Any]:
    import datasets
    import peft
    import trl

    torch.manual_seed(0)
    callback = OffloadCallback() if section else None
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            **settings(folder, stage, section), max_length=LENGTH, dataset_kwargs={"skip_prepare_dataset": True}
        )
        trainer = trl.SFTTrainer(
            tiny_llama(),
            arguments,
            train_dataset=datasets.Dataset.from_list(pieces()),
            processing_class=tokenizer(),
            peft_config=lora,
            callbacks=[callback] if callback else [],
        )
        return facts_of(trainer, callback)


def tokenizer() -> Any:
    """A letter a token: nothing has to be fetched."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"byte{n}": n for n in range(3, 256)}}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
    )


CASES = {
    "trainer plain": (train_with_the_trainer, 3, None),
    "trainer": (train_with_the_trainer, 3, SECTION),
    **({"trl plain": (train_with_trl, 1, None), "trl": (train_with_trl, 1, SECTION)} if HAS_TRL else {}),
}


def run_case(train: Any, stage: int, section: dict[str, Any] | None) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    # Accelerate looks for what a launcher sets, and asks no more once there is a process group.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    AcceleratorState._reset_state(reset_partial_state=True)
    return train(stage, section)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(run_case, CASES, ranks=2)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "trainer",
        pytest.param("trl", marks=pytest.mark.skipif(not HAS_TRL, reason="needs the packages trl, peft, datasets")),
    ],
)
def test_the_same_bits_with_and_without(outcomes: dict[str, Outcome], name: str) -> None:
    plain, offloaded = outcomes[f"{name} plain"].check(), outcomes[name].check()
    for rank in range(2):
        assert len(plain[rank]["losses"]) == (STEPS if rank == 0 else len(offloaded[rank]["losses"]))
        assert offloaded[rank]["losses"] == plain[rank]["losses"]
        assert offloaded[rank]["weights"] == plain[rank]["weights"]
        assert offloaded[rank]["offloaded"] > 0
        assert offloaded[rank]["live"] == 0


ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "{port}", "--module"],
    "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", "{port}", "-m"],
    "accelerate": [
        "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}", "-m",
    ],
}  # fmt: skip


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_under_every_launcher(launcher: str, tmp_path: Path) -> None:
    """The same losses with and without, the script untouched."""

    def losses(module: list[str]) -> tuple[list[str], str]:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = str(bound.getsockname()[1])
        start = [word.format(port=port) for word in LAUNCHERS[launcher]]
        start = [*start, *module] if module else start[:-1]
        arguments = f"--use_cpu true --output_dir {tmp_path} --max_steps 3 --logging_steps 1 --save_strategy no"
        script = ["examples/hf_trainer/finetune.py", "--deepspeed", "ds_configs/hf_zero3.json", *arguments.split()]
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", *start, *script],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"'loss': '?([0-9.]+)", done.stdout + done.stderr), done.stdout

    offloaded, output = losses(["ds_fgoffload.run"])
    assert "model.layers.{0..3}.mlp" in output
    assert len(offloaded) == 3
    assert losses([])[0] == offloaded


def begin(callback: OffloadCallback, model: nn.Module, **more: Any) -> None:
    callback.on_train_begin(None, None, None, model=model, **more)


def test_a_callback_without_a_section_is_an_error() -> None:
    with pytest.raises(ValueError, match=r'OffloadCallback\(\{"modules"'):
        begin(OffloadCallback(), nn.Linear(2, 2))


def test_a_callback_attaches_in_each_training() -> None:
    callback, models = OffloadCallback({"modules": ["0"]}), [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    attachments = []
    for model in [*models, models[0]]:
        begin(callback, model)
        assert get(model) is callback.attachment is not None
        attachments.append(callback.attachment)
        callback.on_train_end()
        assert get(model) is None
    assert len(set(attachments)) == 3


def test_a_training_that_did_not_end_is_no_obstacle_to_the_next() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    begin(OffloadCallback({"modules": ["0"]}), model)
    again = OffloadCallback({"modules": ["*"]})
    begin(again, model)
    assert get(model) is again.attachment
    again.on_train_end()


def test_what_somebody_else_has_attached_is_used() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    attachment, callback = attach(model, {"modules": ["0"]}), OffloadCallback({"modules": ["*"]})
    begin(callback, model)
    assert callback.attachment is attachment
    callback.on_train_end()


def test_a_callback_that_is_switched_off_does_nothing() -> None:
    model, callback = nn.Linear(2, 2), OffloadCallback({"modules": ["*"], "enabled": False})
    begin(callback, model)
    callback.on_train_end()
    assert get(model) is callback.attachment is None


def test_the_engine_of_a_training_is_found() -> None:
    def engine(module: nn.Module) -> DeepSpeedEngine:
        made: DeepSpeedEngine = object.__new__(DeepSpeedEngine)
        made.__dict__.update(module=module, optimizer=object())
        return made

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    engines = [engine(model), engine(model), engine(other)]
    for one in engines:
        assert engine_of(one.module, SimpleNamespace(optimizer=one.optimizer)) is one
        assert engine_of(one.module, one.optimizer) is one
    assert engine_of(other) is engines[2]
    assert engine_of(nn.Linear(2, 2)) is None


def test_without_deepspeed_the_model_is_attached_to(capsys: pytest.CaptureFixture[str]) -> None:
    callback = OffloadCallback(SECTION)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = {**settings(folder, 0, None), "deepspeed": None}
        trainer = transformers.Trainer(
            tiny_llama(), transformers.TrainingArguments(**arguments), train_dataset=pieces(), callbacks=[callback]
        )
        facts = facts_of(trainer, callback)
    assert facts["offloaded"] > 0
    assert facts["live"] == 0
    assert "model.layers.{0,1}.mlp" in capsys.readouterr().out
    assert not tallies()[-1].has_news  # ds_fgoffload.run prints no second table
