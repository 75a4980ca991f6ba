"""Fine-tunes a causal language model with the Trainer of transformers. It knows nothing of ds_fgoffload.

The model is small and has random weights, the text is Python's own standard library, so nothing is fetched. Take
``AutoModelForCausalLM.from_pretrained`` and a data set of your own for real work.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    """What is trained."""

    model_type: str = field(default="qwen3", metadata={"help": "a model type of transformers"})
    hidden_size: int = field(default=256, metadata={"help": "width of the model"})
    layers: int = field(default=4, metadata={"help": "decoder layers"})
    sequence: int = field(default=256, metadata={"help": "bytes in a sequence"})


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Python's standard library as bytes; a byte is a token."""

    def __init__(self, sequence: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = bytearray(b"".join(file.read_bytes() for file in files))
        self._tokens = torch.frombuffer(text, dtype=torch.uint8)
        self._sequence = sequence

    def __len__(self) -> int:
        return len(self._tokens) // self._sequence

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._tokens[index * self._sequence :][: self._sequence].long()
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Arguments are those of the Trainer, and ``ModelArguments``."""
    shape, arguments = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    config = AutoConfig.for_model(
        shape.model_type,
        vocab_size=256,
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=shape.hidden_size // 8,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    Trainer(model, arguments, train_dataset=Text(shape.sequence)).train()


if __name__ == "__main__":
    main()
