"""Inputs of checkpointed layers on the host: a Qwen3-shaped Hugging Face decoder, gradient checkpointing, 32k tokens.

One process, one model, in turn: plain checkpointing; ds_fgoffload with ``SECTION``; TRL's
``OffloadActivations``; DeepSpeed's ``CheckpointHiddenStatesOffload``.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload
from transformers import Qwen3Config, Qwen3ForCausalLM

import ds_fgoffload
from benchmarks.measure import GIB, Steps, run_steps, save, summary, trl_activation_offloading

SECTION = {"modules": ["model"]}
LEARNING_STEPS = 8
MODES = ("plain", "ours", "trl", "deepspeed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="checkpoint_inputs")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    trl = trl_activation_offloading()

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=arguments.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=arguments.vocabulary,
        max_position_embeddings=arguments.length,
        use_cache=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).bfloat16()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = torch.randint(0, arguments.vocabulary, (1, arguments.length), device="cuda")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    trl_context = trl.OffloadActivations()
    trl_context.update_model_params(model)
    deepspeed_context = CheckpointHiddenStatesOffload()
    contexts = {"plain": nullcontext(), "ours": nullcontext(), "trl": trl_context, "deepspeed": deepspeed_context}
    contexts = {name: contexts[name] for name in MODES if name in {"plain", *arguments.modes}}

    rounds: dict[str, list[Steps]] = {name: [] for name in contexts}
    figures: dict[str, Any] = {"arguments": vars(arguments), "section": SECTION}
    for round_ in range(arguments.rounds):
        # each second round the other way round, so that what changes with time falls on all alike
        for name in list(contexts) if round_ % 2 == 0 else reversed(contexts):
            context = contexts[name]

            def step(context: Any = context) -> torch.Tensor:
                model.zero_grad(set_to_none=False)
                with context:
                    loss = model(input_ids=tokens, labels=tokens).loss
                    loss.backward()
                detached: torch.Tensor = loss.detach()
                return detached

            attachment = ds_fgoffload.attach(model, SECTION) if name == "ours" else None
            try:
                rounds[name].append(
                    run_steps(step, warmup=LEARNING_STEPS if attachment else 1, repeats=arguments.repeats)
                )
            except torch.OutOfMemoryError as error:
                figures.setdefault("failed", {})[name] = str(error).split("\n", maxsplit=1)[0]
            if attachment is not None:
                stats = attachment.stats()
                figures["ours_stats"] = {k: v for k, v in vars(stats).items() if isinstance(v, int | float)}
                attachment.detach()
            torch.cuda.empty_cache()
    for name, steps in rounds.items():
        if steps:
            figures[name] = summary(steps)
    plain = figures["plain"]
    for name in ("ours", "trl", "deepspeed"):
        if name in figures:
            figures[name]["freed_reserved_gib"] = plain["max_reserved_gib"] - figures[name]["max_reserved_gib"]
            figures[name]["added_time"] = figures[name]["step_ms_median"] / plain["step_ms_median"] - 1
    figures["inputs_gib"] = arguments.layers * arguments.length * 4096 * 2 / GIB
    save(arguments.name, figures)
    for key, value in figures.items():
        shown = {k: v for k, v in value.items() if k != "rounds"} if isinstance(value, dict) else value
        print(key, shown)


if __name__ == "__main__":
    main()
