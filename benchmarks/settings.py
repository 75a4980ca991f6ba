"""What is compared, as tables: the modules whose activations are offloaded, settings of ours, everyone else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks import modes
from benchmarks.megatron import megatron
from benchmarks.modes import Mode

SELECTED: dict[str, list[str]] = {
    "deepseek": [
        "layers.*.mlp.experts.fc1",
        "layers.*.mlp.experts.act",
        "layers.*.input_layernorm",
        "layers.*.post_attention_layernorm",
    ],
    "llama8b": ["layers.*.attn_norm", "layers.*.mlp_norm", "layers.*.mlp.act_fn", "layers.*.mlp.down_proj"],
}
"""What is offloaded: 0.92 GiB a layer of the one stack, 0.28 GiB of the other, at 4096 tokens."""

OURS: dict[str, dict[str, Any]] = {
    "ours almost free": {},
    "ours everything": {"policy": "all"},
    "ours at most 5%": {"max_overhead": 0.05},
    "ours 4 GiB": {"target_saved_bytes": "4GiB"},
}
"""Sections of ours by the mode's name; ``modules`` are SELECTED unless a section has its own."""

_MOE_RECOMPUTED = [
    "layers.*.input_layernorm",
    "layers.*.post_attention_layernorm",
    "layers.*.self_attn.*_norm",
    "norm",
    "layers.*.mlp.experts.act",
    "layers.*.mlp.shared_experts.act",
]
_DENSE_RECOMPUTED = ["layers.*.attn_norm", "layers.*.mlp_norm", "norm", "layers.*.mlp.act_fn"]
RECOMPUTED: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek": {
        "recomputed norms and act": {"modules": [], "recompute": _MOE_RECOMPUTED},
        "recomputed norms and act, the rest offloaded": {"recompute": _MOE_RECOMPUTED},
        "7 GiB offloaded": {"target_saved_bytes": "7GiB"},
    },
    "llama8b": {
        "recomputed norms and act": {"modules": [], "recompute": _DENSE_RECOMPUTED},
        "recomputed norms and act, the rest offloaded": {"recompute": _DENSE_RECOMPUTED},
    },
}
"""Sections with units under ``recompute``, by model, and what frees as much by offload alone; only when asked for."""

SEVERAL_GPUS: dict[str, dict[str, Any]] = {
    "almost free": {"release_pipeline_buffers": True},
    "everything": {"policy": "all", "release_pipeline_buffers": True},
}
"""Sections that ``benchmarks.two_gpus`` compares, to which the same modules are added."""

LEARNING_STEPS = 24
"""Steps before those that are timed, in which ours may learn."""

OTHERS = (
    Mode("megatron", "Megatron-Core, the same modules", megatron, 3, needs_gpu=True),
    Mode("megatron cap 2", "Megatron-Core, at most 2 in flight", partial(megatron, in_flight=2), 3, needs_gpu=True),
    Mode("megatron half", "Megatron-Core, half of the groups", partial(megatron, fraction=0.5), 3, needs_gpu=True),
    Mode("trl", "TRL `OffloadActivations`, the same modules", partial(modes.trl, whole=False), needs_gpu=True),
    Mode("save_on_cpu", "`save_on_cpu(pin_memory=True)`, the same modules", partial(modes.on_cpu, whole=False)),
    Mode("recompute", "every layer recomputed", modes.recompute),
    Mode("deepspeed", "recompute, DeepSpeed's own taking the layers' inputs", modes.deepspeed_checkpoint_inputs),
    Mode("trl whole", "TRL `OffloadActivations`, the whole model", partial(modes.trl, whole=True), needs_gpu=True),
    Mode("save_on_cpu whole", "`save_on_cpu(pin_memory=True)`, the whole model", partial(modes.on_cpu, whole=True)),
)

OPTIONAL = {"trl whole", "save_on_cpu whole"}
"""Run only when asked for: they take seconds a step and tens of GiB of pinned memory."""


def table(sections: Mapping[str, Mapping[str, Any]] = OURS) -> dict[str, Mode]:
    """All modes by name, in the order in which a round runs them; ``sections`` are those of ours."""
    ours = [
        Mode(name, name, partial(modes.ours, section=section), LEARNING_STEPS, section=section)
        for name, section in sections.items()
    ]
    return {mode.name: mode for mode in (Mode("plain", "nothing offloaded", modes.plain), *ours, *OTHERS)}
