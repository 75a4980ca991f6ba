"""Every alias, on a real model of every family, as the installed transformers builds it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.selection.aliases import resolve, words_of
from ds_fgoffload.selection.families import FAMILIES, MEANINGS
from ds_fgoffload.selection.patterns import select

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**SPARSE, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**SPARSE, "num_experts": 4},
    "mixtral": {**SPARSE, "num_local_experts": 4},
    "deepseek_v3": {
        **SPARSE, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "gpt_neox": {},
    "phi": {},
    "phi3": {},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}  # fmt: skip

QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
LLAMA = {
    "layer": "",
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "qkv_linear": QKV,
    "core_attn": "self_attn",
    "attn_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "layernorm": "input_layernorm post_attention_layernorm",
    "mlp": "mlp",
    "mlp_fc1": "mlp.gate_proj mlp.up_proj",
    "mlp_act": "mlp.act_fn",
    "mlp_fc2": "mlp.down_proj",
}
QK_NORM = {"qk_norm": "self_attn.q_norm self_attn.k_norm"}
EXPERTS = {
    "moe": "mlp",
    "router": "mlp.gate",
    "experts": "mlp.experts",
    "expert_fc1": "mlp.experts",
    "moe_act": "mlp.experts.act_fn",
    "expert_fc2": "mlp.experts",
}
GEMMA2 = {
    "mlp_norm": "pre_feedforward_layernorm",
    "layernorm": "input_layernorm pre_feedforward_layernorm",
}
NO_DENSE_MLP = dict.fromkeys(["mlp_fc1", "mlp_act", "mlp_fc2"], None)
SECOND_LAYER: dict[str, dict[str, str | None]] = {
    "llama": {**LLAMA},
    "mistral": {**LLAMA},
    "qwen2": {**LLAMA},
    "qwen3": {**LLAMA, **QK_NORM},
    "qwen2_moe": {**LLAMA, **EXPERTS, **NO_DENSE_MLP, "shared_experts": "mlp.shared_expert"},
    "qwen3_moe": {**LLAMA, **QK_NORM, **EXPERTS, **NO_DENSE_MLP},
    "mixtral": {**LLAMA, **EXPERTS, **NO_DENSE_MLP},
    "deepseek_v3": {
        **LLAMA,
        **EXPERTS,
        **NO_DENSE_MLP,
        "qkv_linear": "self_attn.q_a_proj self_attn.q_b_proj self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj",
        "qk_norm": "self_attn.q_a_layernorm self_attn.kv_a_layernorm",
        "mla_up_proj": "self_attn.q_b_proj self_attn.kv_b_proj",
        "shared_experts": "mlp.shared_experts",
    },
    "gemma": {**LLAMA},
    "gemma2": {**LLAMA, **GEMMA2},
    "gemma3_text": {**LLAMA, **GEMMA2, **QK_NORM},
    "gpt_neox": {
        **LLAMA,
        "attn": "attention",
        "qkv_linear": "attention.query_key_value",
        "core_attn": "attention",
        "attn_proj": "attention.dense",
        "mlp_fc1": "mlp.dense_h_to_4h",
        "mlp_act": "mlp.act",
        "mlp_fc2": "mlp.dense_4h_to_h",
    },
    "phi": {
        **LLAMA,
        "attn_proj": "self_attn.dense",
        "mlp_norm": "input_layernorm",
        "layernorm": "input_layernorm",
        "mlp_fc1": "mlp.fc1",
        "mlp_act": "mlp.activation_fn",
        "mlp_fc2": "mlp.fc2",
    },
    "phi3": {
        **LLAMA,
        "qkv_linear": "self_attn.qkv_proj",
        "mlp_fc1": "mlp.gate_up_proj",
        "mlp_act": "mlp.activation_fn",
    },
    "gpt_oss": {**LLAMA, **EXPERTS, **NO_DENSE_MLP, "router": "mlp.router", "moe_act": "mlp.experts"},
}
"""Of the second of two layers (the first of DeepSeek-V3 is dense): alias to names in it, and no others."""


def build(family: str) -> nn.Module:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(family, **{**COMMON, **CONFIGS[family]})
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {}


@pytest.fixture
def model(family: str, models: dict[str, nn.Module]) -> nn.Module:
    if family not in models:
        models[family] = build(family)
    return models[family]


@pytest.mark.parametrize("family", CONFIGS)
def test_the_names_of_every_family(model: nn.Module, family: str) -> None:
    named = list(model.named_modules())
    prefix = next(name for name, module in named if name.endswith("layers")) + ".1"
    found = {}
    for word in MEANINGS:
        inside = [name for name in resolve(f"@{word}", named).names if f"{name}.".startswith(f"{prefix}.")]
        if inside:
            found[word] = {name[len(prefix) + 1 :] for name in inside}
    wanted = SECOND_LAYER[family]
    assert found == {word: set(names.split() or [""]) for word, names in wanted.items() if names is not None}


@pytest.mark.parametrize("family", CONFIGS)
def test_every_layer_has_its_part(model: nn.Module, family: str) -> None:
    assert len(select(model, ["@attn_proj"]).units) == COMMON["num_hidden_layers"]


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_dense_layers_of_a_sparse_model(model: nn.Module, family: str) -> None:
    def units(alias: str) -> list[str]:
        return list(select(model, [alias]).units)

    assert units("@mlp") == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert units("@moe") == ["model.layers.1.mlp"]
    assert units("@mlp_fc2") == ["model.layers.0.mlp.down_proj"]
    assert units("@expert_fc1") == ["model.layers.1.mlp.experts"]


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_what_an_alias_becomes_is_told(model: nn.Module, family: str) -> None:
    assert select(model, ["@expert_fc1", "@core_attn"]).notes == (
        "@expert_fc1 in Qwen3MoeDecoderLayer: the experts are one module, so all that they save is taken, "
        "not only what this projection saves",
        "@core_attn in Qwen3MoeDecoderLayer: attention's core is a function, no module, "
        "so the whole of self_attn is taken",
    )
    assert select(model, ["@router", "@attn_norm"]).notes == ()


@pytest.mark.parametrize("family", ["llama"])
def test_a_part_that_the_family_has_not(model: nn.Module, family: str) -> None:
    with pytest.raises(OffloadConfigError) as raised:
        select(model, ["@router"])
    message = str(raised.value)
    assert message.startswith('fine_grained_offload.modules: pattern "@router" matches no module (the names to choose')
    assert "model.layers.*.mlp.down_proj" in message
    assert message.endswith("; a LlamaDecoderLayer has " + ", ".join(words_of("LlamaDecoderLayer")))
    assert "@router" not in words_of("LlamaDecoderLayer")


def expert(first: str, act: str, last: str) -> nn.Module:
    module = nn.Module()
    module.add_module(first, nn.Linear(4, 8))
    module.add_module(act, nn.GELU())
    module.add_module(last, nn.Linear(8, 4))
    module.forward = lambda x: x
    return module


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(expert("wide", "act", "narrow") for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_family_that_is_not_known_gets_the_names_to_choose_from() -> None:
    with pytest.raises(OffloadConfigError) as raised:
        select(Unknown(), ["@attn_norm"])
    assert str(raised.value) == (
        'fine_grained_offload.modules: pattern "@attn_norm" matches no module (the names to choose from: '
        "blocks.*.wide, blocks.*.act, blocks.*.narrow); "
        f"aliases are known for layers of the classes {', '.join(FAMILIES)}"
    )


def test_names_in_front_of_the_layers_do_not_matter() -> None:
    inner = build("llama")
    root = nn.Module()
    root.base_model = nn.Module()
    root.base_model.model = inner
    assert list(select(root, ["@mlp_fc2"]).units) == [
        f"base_model.model.model.layers.{n}.mlp.down_proj" for n in range(2)
    ]


def deepspeed_moe(inner: nn.Module, **options: Any) -> nn.Module:
    """``MoE`` makes process groups only later, and none is needed for its names."""
    from deepspeed.moe.layer import MoE

    return MoE(4, inner, num_experts=2, **options)


@pytest.fixture(scope="module")
def rank():
    from tests.helpers.distributed import one_rank

    with one_rank():
        import deepspeed

        deepspeed.init_distributed("gloo")
        yield


EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts"


@pytest.mark.parametrize(
    ("inner", "alias", "names", "notes"),
    [
        (expert("fc1", "act", "fc2"), "@expert_fc1", [f"{EXPERT}.{n}.fc1" for n in range(2)], 0),
        (expert("fc1", "act", "fc2"), "@moe_act", [f"{EXPERT}.{n}.act" for n in range(2)], 0),
        (expert("w1", "act", "w2"), "@expert_fc2", [f"{EXPERT}.{n}.w2" for n in range(2)], 0),
        (expert("one", "two", "three"), "@expert_fc1", [f"{EXPERT}.{n}" for n in range(2)], 1),
        (expert("one", "two", "three"), "@experts", [f"{EXPERT}.{n}" for n in range(2)], 0),
        (expert("fc1", "act", "fc2"), "@router", ["moe.deepspeed_moe.gate"], 0),
        (expert("fc1", "act", "fc2"), "@moe", ["moe"], 0),
    ],
)
def test_deepspeeds_own_moe_layer(rank: None, inner: nn.Module, alias: str, names: list[str], notes: int) -> None:
    root = nn.Module()
    root.moe = deepspeed_moe(inner)
    selection = select(root, [alias])
    assert list(selection.units) == names
    assert len(selection.notes) == notes


def test_the_dense_expert_beside_deepspeeds_moe(rank: None) -> None:
    root = nn.Module()
    root.moe = deepspeed_moe(expert("fc1", "act", "fc2"), use_residual=True)
    assert list(select(root, ["@shared_experts"]).units) == ["moe.mlp"]


def test_every_word_of_the_table_is_explained() -> None:
    assert {word for parts in FAMILIES.values() for word in parts} <= set(MEANINGS)
