"""What each model family calls the parts of its decoder layer: the table that ``@alias`` patterns are resolved by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

MEANINGS: Mapping[str, str] = {
    "layer": "a whole decoder layer",
    "attn_norm": "the norm before attention",
    "attn": "attention as a whole, with its projections",
    "qkv_linear": "the projections to queries, keys and values",
    "qk_norm": "norms of queries and keys, or of the compressed ones of latent attention",
    "mla_up_proj": "the up-projections of latent attention",
    "core_attn": "attention without its projections",
    "attn_proj": "the projection of attention's output",
    "mlp_norm": "the norm before the MLP or the experts",
    "layernorm": "both norms of a layer",
    "mlp": "the MLP as a whole; in a sparse layer router and experts",
    "mlp_fc1": "the first projections of a dense MLP (gate and up)",
    "mlp_act": "the activation function of a dense MLP",
    "mlp_fc2": "the last projection of a dense MLP",
    "moe": "router, experts and shared experts of a sparse layer",
    "router": "what chooses the experts",
    "experts": "the routed experts",
    "expert_fc1": "the first projections of the routed experts",
    "moe_act": "the activation function of the routed experts",
    "expert_fc2": "the last projection of the routed experts",
    "shared_experts": "the experts that every token goes through",
}
"""Every alias, without its ``@``, and what it stands for."""


class Choice(NamedTuple):
    """One way in which a family may have a part: it is taken if any of the modules is there."""

    paths: tuple[str, ...]
    """Names relative to the layer; ``#`` is any number, ``""`` the layer itself."""
    note: str = ""
    """What to tell the user: that these modules are more, or other, than the word says."""
    beside: str = ""
    """Only in a layer that has this, too."""


Part: TypeAlias = tuple[Choice, ...]
"""The choices, best first. A layer takes the first that it has."""


def _part(*paths: str) -> Part:
    return (Choice(paths),)


_ATTENTION: Mapping[str, Part] = {
    "layer": _part(""),
    "attn_norm": _part("input_layernorm"),
    "attn": _part("self_attn"),
    "qkv_linear": _part("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "qk_norm": _part("self_attn.q_norm", "self_attn.k_norm"),
    "core_attn": (
        Choice(("self_attn",), "attention's core is a function, no module, so the whole of self_attn is taken"),
    ),
    "attn_proj": _part("self_attn.o_proj"),
    "mlp_norm": _part("post_attention_layernorm"),
    "layernorm": _part("input_layernorm", "post_attention_layernorm"),
}

_GATED_MLP: Mapping[str, Part] = {
    "mlp": _part("mlp"),
    "mlp_fc1": _part("mlp.gate_proj", "mlp.up_proj"),
    "mlp_act": _part("mlp.act_fn"),
    "mlp_fc2": _part("mlp.down_proj"),
}

_FUSED = "the experts are one module, so all that they save is taken, not only what this projection saves"

_EXPERTS: Mapping[str, Part] = {
    "mlp": _part("mlp", "block_sparse_moe"),
    "moe": (Choice(("mlp",), beside="mlp.experts"), Choice(("block_sparse_moe",))),
    "router": _part("mlp.gate", "mlp.router", "block_sparse_moe.gate"),
    "experts": (
        Choice(("mlp.experts.#", "block_sparse_moe.experts.#")),
        Choice(("mlp.experts", "block_sparse_moe.experts")),
    ),
    "expert_fc1": (
        Choice(("mlp.experts.#.gate_proj", "mlp.experts.#.up_proj")),
        Choice(("block_sparse_moe.experts.#.w1", "block_sparse_moe.experts.#.w3")),
        Choice(("mlp.experts",), _FUSED),
    ),
    "moe_act": (
        Choice(("mlp.experts.act_fn", "mlp.experts.#.act_fn", "block_sparse_moe.experts.#.act_fn")),
        Choice(("mlp.experts",), "the experts have no activation module, so all that they save is taken"),
    ),
    "expert_fc2": (
        Choice(("mlp.experts.#.down_proj", "block_sparse_moe.experts.#.w2")),
        Choice(("mlp.experts",), _FUSED),
    ),
    "shared_experts": _part("mlp.shared_experts", "mlp.shared_expert"),
}

_LLAMA = {**_ATTENTION, **_GATED_MLP}
_SPARSE = {**_LLAMA, **_EXPERTS}
_LATENT: Mapping[str, Part] = {
    "qkv_linear": _part(
        *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
    ),
    "qk_norm": _part("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
    "mla_up_proj": _part("self_attn.q_b_proj", "self_attn.q_proj", "self_attn.kv_b_proj"),
}
_NORM_ALSO_AFTER: Mapping[str, Part] = {
    "mlp_norm": _part("pre_feedforward_layernorm"),
    "layernorm": _part("input_layernorm", "pre_feedforward_layernorm"),
}
_ONE_NORM = "one norm feeds attention and the MLP, so it is that one"
_PHI: Mapping[str, Part] = {
    "attn_proj": _part("self_attn.dense"),
    "qk_norm": _part("self_attn.q_layernorm", "self_attn.k_layernorm"),
    "mlp_norm": (Choice(("input_layernorm",), _ONE_NORM),),
    "layernorm": _part("input_layernorm"),
    "mlp_fc1": _part("mlp.fc1"),
    "mlp_act": _part("mlp.activation_fn"),
    "mlp_fc2": _part("mlp.fc2"),
}
_PHI3: Mapping[str, Part] = {
    "qkv_linear": _part("self_attn.qkv_proj"),
    "mlp_fc1": _part("mlp.gate_up_proj"),
    "mlp_act": _part("mlp.activation_fn"),
}
_NEOX: Mapping[str, Part] = {
    "layer": _part(""),
    "attn_norm": _part("input_layernorm"),
    "attn": _part("attention"),
    "qkv_linear": _part("attention.query_key_value"),
    "core_attn": (
        Choice(("attention",), "attention's core is a function, no module, so the whole of attention is taken"),
    ),
    "attn_proj": _part("attention.dense"),
    "mlp_norm": _part("post_attention_layernorm"),
    "layernorm": _part("input_layernorm", "post_attention_layernorm"),
    "mlp": _part("mlp"),
    "mlp_fc1": _part("mlp.dense_h_to_4h"),
    "mlp_act": _part("mlp.act"),
    "mlp_fc2": _part("mlp.dense_4h_to_h"),
}
_DEEPSPEED_EXPERT = "deepspeed_moe.experts.deepspeed_experts.#"
_OWN_EXPERT = "the experts are modules of your own with other names inside, so whole experts are taken"
_DEEPSPEED_MOE: Mapping[str, Part] = {
    "moe": _part(""),
    "mlp": _part(""),
    "router": _part("deepspeed_moe.gate"),
    "experts": _part(_DEEPSPEED_EXPERT),
    "expert_fc1": (
        *(
            Choice(tuple(f"{_DEEPSPEED_EXPERT}.{name}" for name in names))
            for names in (("gate_proj", "up_proj"), ("w1", "w3"), ("fc1",), ("dense_h_to_4h",), ("c_fc",), ("wi",))
        ),
        Choice((_DEEPSPEED_EXPERT,), _OWN_EXPERT),
    ),
    "moe_act": (
        Choice(tuple(f"{_DEEPSPEED_EXPERT}.{name}" for name in ("act_fn", "act", "activation", "activation_fn"))),
        Choice((_DEEPSPEED_EXPERT,), _OWN_EXPERT),
    ),
    "expert_fc2": (
        Choice(
            tuple(f"{_DEEPSPEED_EXPERT}.{name}" for name in ("down_proj", "w2", "fc2", "dense_4h_to_h", "c_proj", "wo"))
        ),
        Choice((_DEEPSPEED_EXPERT,), _OWN_EXPERT),
    ),
    "shared_experts": _part("mlp"),  # use_residual: a dense MLP beside the experts
}

FAMILIES: Mapping[str, Mapping[str, Part]] = {
    **dict.fromkeys(
        ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "GemmaDecoderLayer"),
        _LLAMA,
    ),
    **{key: {**_LLAMA, **_NORM_ALSO_AFTER} for key in ("Gemma2DecoderLayer", "Gemma3DecoderLayer")},
    **dict.fromkeys(("MixtralDecoderLayer", "Qwen2MoeDecoderLayer", "Qwen3MoeDecoderLayer"), _SPARSE),
    **{key: {**_SPARSE, **_LATENT} for key in ("DeepseekV2DecoderLayer", "DeepseekV3DecoderLayer")},
    "GptOssDecoderLayer": {**_ATTENTION, **_EXPERTS},
    "GPTNeoXLayer": _NEOX,
    "PhiDecoderLayer": {**_LLAMA, **_PHI},
    "Phi3DecoderLayer": {**_LLAMA, **_PHI3},
    "MoE": _DEEPSPEED_MOE,
}
"""By the class name of the layer: what its parts are called."""
