"""What DeepSpeed brings along beside its engines, on two ranks: the same bits with offloading, or refused by name.

The table "DeepSpeed's own features" in docs/composition.md has a line for each of them.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups, safe_get_full_grad
from torch import Tensor, nn

import ds_fgoffload
from tests.helpers.distributed import Outcome, run_cases

WIDTH, HEADS, LENGTH, SEQUENCES, VOCABULARY, LAYERS = 16, 2, 8, 2, 11, 2
STEPS, ACCUMULATION = 3, 2
HAS_PEFT = importlib.util.find_spec("peft") is not None
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def run_mlp(self: Any, x: Tensor) -> Tensor:
    return Mlp.forward(self, x)


class Tiled(Mlp):
    """ALST's TiledMLP: forward without gradients, and tile by tile once more in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return TiledMLP.apply(run_mlp, self, x, 2, list(self.parameters()))


class Experts(nn.Module):
    """DeepSpeed's expert parallel layer: each rank has half of the experts."""

    def __init__(self, *, drop_tokens: bool, k: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(WIDTH, Mlp(), num_experts=4, ep_size=2, k=k, capacity_factor=0.5, min_capacity=1,
                       drop_tokens=drop_tokens)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        output, balance, _ = self.moe(x)
        return output + balance.to(output.dtype)  # so that the loss of the router counts


class Core(nn.Module):
    """Attention over (sequence, batch, heads, width of a head)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3)


class Attention(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.qkv, self.core, self.out = nn.Linear(WIDTH, 3 * WIDTH), core, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).transpose(0, 1).unflatten(-1, (3, HEADS, -1))
        return self.out(self.core(*heads.unbind(2), 1).flatten(2).transpose(0, 1))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = (
            nn.LayerNorm(WIDTH),
            attention,
            nn.LayerNorm(WIDTH),
            mlp,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Gives the loss."""

    def __init__(self, attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module], loss: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(attention(), mlp()) for _ in range(LAYERS))
        self.norm, self.loss = nn.LayerNorm(WIDTH), loss

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.norm(x), tokens.roll(-1, dims=1))


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self, x, y)


def loss_of(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self.head(x).flatten(0, -2).float(), y.flatten())


class TiledLoss(Loss):
    """Runs backward in its forward, which is why it must not run a second time."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return TiledFusedLogitsLoss.apply(loss_of, self, x, y, None, 2, [self.head.weight], "mean")


class SequenceTiledLoss(Loss):
    """The same by ALST's general function, which runs forward a second time in backward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def tile(x: Tensor, y: Tensor) -> Tensor:
            return loss_of(self, x, y)

        return SequenceTiledCompute.apply(
            tile, LENGTH, 2, ["x", "y"], [], "x", [self.head.weight], 0, "mean", "x", "y", x, y
        )


class LoraLinear(nn.Module):
    """A frozen linear layer with a low-rank part that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(self.dropout(x)))


def plain_model() -> nn.Module:
    return Model(lambda: Attention(Core()), Mlp, Loss())


def with_mlp(mlp: Callable[[], nn.Module]) -> nn.Module:
    return Model(lambda: Attention(Core()), mlp, Loss())


def with_loss(loss: Callable[[], nn.Module]) -> nn.Module:
    return Model(lambda: Attention(Core()), Mlp, loss())


def ulysses() -> nn.Module:
    group = parallel_state_sp.get_sequence_parallel_group()
    return Model(lambda: Attention(DistributedAttention(Core(), group, scatter_idx=2, gather_idx=0)), Mlp, Loss())


def lora() -> nn.Module:
    model = plain_model().requires_grad_(False)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.mlp.fc1, layer.mlp.fc2 = LoraLinear(layer.mlp.fc1), LoraLinear(layer.mlp.fc2)
    return model


def peft_lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["fc1", "fc2", "qkv"], lora_dropout=0.1, init_lora_weights=False)
    return peft.get_peft_model(plain_model(), config).base_model.model


def expert_groups(model: nn.Module) -> Any:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    return split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})


@dataclass
class Feature:
    """A feature of DeepSpeed, and what units of ours do with it."""

    zero: dict[str, Any] = field(default_factory=lambda: {"stage": 1})
    config: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = plain_model
    whole: str = "re:layers\\.[0-9]+\\.mlp"
    """A unit under recompute that contains what is special."""
    whole_calls: int = LAYERS
    """Its calls that are made again in a micro-batch."""
    whole_is_refused: str = ""
    """Why it is not recomputed, if it is not."""
    cheap_calls: int = 3 * LAYERS
    """Calls of norms and activation functions that are made again in a micro-batch."""
    offloaded: str = "re:layers\\.[0-9]+"
    cheap_is_refused: str = ""
    cheap: tuple[str, ...] = ("layers.*norm?", "*.act")
    gradients: bool = True
    """False: DeepSpeed does not give them out here, and weights alone are compared."""
    parameter_groups: Callable[[nn.Module], Any] | None = None
    optimizer: str = ""
    """The class that DeepSpeed wraps the optimizer in."""
    same_data: bool = False
    """Ranks have the same data."""
    sequence_parallel: bool = False
    stepping: str = "engine"
    compiled: bool = False


AUTOTP = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [".*\\.fc1\\.weight$"], "partition_type": "column"},
                {"patterns": [".*\\.fc2\\.weight$"], "partition_type": "row"},
            ],
        },
    }
}
CPU = {"device": "cpu"}
WEAK = {"zero_force_ds_cpu_optimizer": False}  # else DeepSpeed compiles its Adam for the host
TILED_INNER = LAYERS * 2  # norms; what a tile calls runs in backward, or without gradients
REFUSED_BACKWARD = "runs a backward"

FEATURES: dict[str, Feature] = {
    "moe, tokens dropped": Feature(
        model=functools.partial(with_mlp, functools.partial(Experts, drop_tokens=True, k=1)),
        parameter_groups=expert_groups,
        whole_is_refused="sets the attribute",
        cheap_calls=4 * LAYERS,
    ),
    "moe, no token dropped": Feature(
        {"stage": 2},
        model=functools.partial(with_mlp, functools.partial(Experts, drop_tokens=False, k=2)),
        parameter_groups=expert_groups,
        whole_is_refused="sets the attribute",
        cheap_calls=4 * LAYERS,
    ),
    "tiled mlp": Feature({"stage": 2}, model=functools.partial(with_mlp, Tiled), cheap_calls=TILED_INNER),
    "tiled mlp, zero3": Feature({"stage": 3}, model=functools.partial(with_mlp, Tiled), cheap_calls=TILED_INNER),
    "tiled logits loss": Feature(
        model=functools.partial(with_loss, TiledLoss), whole="loss", whole_is_refused=REFUSED_BACKWARD
    ),
    "tiled logits loss, zero3": Feature(
        {"stage": 3}, model=functools.partial(with_loss, TiledLoss), whole="loss", whole_is_refused=REFUSED_BACKWARD
    ),
    "sequence tiled loss": Feature(
        {"stage": 3}, model=functools.partial(with_loss, SequenceTiledLoss), whole="loss", whole_calls=0
    ),
    "optimizer on the host, zero2": Feature({"stage": 2, "offload_optimizer": CPU}, WEAK),
    "optimizer on the host, zero3": Feature({"stage": 3, "offload_optimizer": CPU}, WEAK),
    "parameters on the host": Feature(
        {"stage": 3, "offload_param": CPU, "offload_optimizer": CPU, "stage3_param_persistence_threshold": 0}, WEAK
    ),
    "hpz": Feature({"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}),
    **{
        f"torch_autocast, zero{stage}": Feature(
            {"stage": stage}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        )
        for stage in (1, 3)
    },
    "bf16 optimizer": Feature(
        config={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, optimizer="BF16_Optimizer"
    ),
    "fp16, zero2": Feature({"stage": 2}, {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}),
    "fp16, zero3": Feature({"stage": 3}, {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}),
    "lora, zero2": Feature({"stage": 2}, model=lora),
    "lora, zero3": Feature({"stage": 3, "stage3_param_persistence_threshold": 0}, model=lora),
    "peft, zero3": Feature({"stage": 3, "stage3_param_persistence_threshold": 0}, model=peft_lora),
    "boundary by hand": Feature({"stage": 2}, stepping="boundary"),
    "no_sync": Feature({"stage": 1}, stepping="no_sync"),
    "accelerate": Feature({"stage": 2}, stepping="accelerate", gradients=False),
    "engine.compile": Feature(
        compiled=True, offloaded="*", whole="*", whole_is_refused="torch.compile has compiled", cheap=()
    ),
    # what follows leaves groups of ranks behind
    "ulysses": Feature(
        {"stage": 2}, model=ulysses, whole="re:layers\\.[0-9]+\\.attention", sequence_parallel=True, same_data=True
    ),
    "ulysses, zero3": Feature(
        {"stage": 3}, model=ulysses, whole="re:layers\\.[0-9]+\\.attention", sequence_parallel=True, same_data=True
    ),
    "autotp": Feature(config=AUTOTP, same_data=True),
}

SECTIONS = ("offload", "cheap", "whole")


def section_of(feature: Feature, name: str) -> dict[str, Any]:
    recompute = {"offload": [], "cheap": list(feature.cheap), "whole": [feature.whole]}[name]
    return {"modules": [feature.offloaded], "recompute": recompute, "min_tensor_bytes": 0}


def micro_batches(feature: Feature) -> Iterator[Tensor]:
    rank = deepspeed.comm.get_rank()
    for number in range(STEPS * ACCUMULATION):
        seed = 10 * number + (0 if feature.same_data else rank)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(seed))
        yield tokens.chunk(2, dim=1)[rank] if feature.sequence_parallel else tokens


def train(feature: Feature, section: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    """Losses, and at each step gradients and weights; and what was counted."""
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if feature.sequence_parallel:
        parallel_state_sp._release_sequence_parallel_groups()
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
        options["mpu"] = parallel_state_sp
    model = feature.model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": dict(feature.zero),
        "zero_allow_untested_optimizer": True,
        **feature.config,
    }
    if section is not None:
        config["fine_grained_offload"] = section
    parameters = model.parameters() if feature.parameter_groups is None else feature.parameter_groups(model)
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    engine = ds_fgoffload.initialize(model=model, optimizer=optimizer, config=config, **options)[0]
    assert feature.optimizer in type(engine.optimizer).__name__
    if feature.compiled:
        engine.compile(backend="eager")
    torch.manual_seed(1)
    found: list[Tensor] = []
    for number, tokens in enumerate(micro_batches(feature)):
        is_last = number % ACCUMULATION == ACCUMULATION - 1
        if feature.stepping == "boundary":
            engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        with engine.no_sync() if feature.stepping == "no_sync" and not is_last else nullcontext():
            loss = engine(tokens)
            engine.backward(loss)
        found.append(loss.detach().clone())
        if is_last:
            trained = [p for p in model.parameters() if p.requires_grad]
            if feature.gradients:
                found += [gradient.clone() for p in trained if (gradient := safe_get_full_grad(p)) is not None]
            engine.step()
            with deepspeed.zero.GatheredParameters(trained):
                found += [p.detach().clone() for p in trained]
        elif feature.stepping != "boundary":
            engine.step()
    found.append(torch.get_rng_state())
    offload = ds_fgoffload.get(engine)
    stats = None if offload is None else offload.stats()
    engine.destroy()
    groups.mpu = groups.mesh_device = None
    torch._dynamo.reset()
    return found, stats


@functools.cache
def plain(name: str) -> list[Tensor]:
    return train(FEATURES[name], None)[0]


def compare(name: str, section: str) -> list[str]:
    """What is wrong, once both have trained: a rank that raised would leave its peer in a collective."""
    feature = FEATURES[name]
    expected = plain(name)
    found, stats = train(feature, section_of(feature, section))
    wrong: list[str] = []
    if len(found) != len(expected):
        wrong.append(f"{len(found)} results instead of {len(expected)}")
    differing = [number for number, pair in enumerate(zip(found, expected, strict=False)) if not torch.equal(*pair)]
    if differing:
        wrong.append(f"results {differing} of {len(found)} differ")
    refused = {name: unit.recompute_refused for name, unit in stats.units.items() if unit.recompute_refused}
    reason = {"offload": "", "cheap": feature.cheap_is_refused, "whole": feature.whole_is_refused}[section]
    if bool(refused) != bool(reason) or any(reason not in refusal for refusal in refused.values()):
        wrong.append(f"refused {refused}, not because {reason!r}")
    calls = {"offload": 0, "cheap": feature.cheap_calls, "whole": 0 if reason else feature.whole_calls}[section]
    if stats.recomputations != STEPS * ACCUMULATION * calls:
        wrong.append(f"{stats.recomputations} recomputations instead of {STEPS * ACCUMULATION * calls}")
    if not stats.offloaded_bytes or stats.live_host_bytes:
        wrong.append(f"{stats.offloaded_bytes} bytes went to the host and {stats.live_host_bytes} stayed there")
    return wrong


CASES = {f"{name}: {section}": (name, section) for name in FEATURES for section in SECTIONS}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(compare, CASES)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_or_refused(case: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[case].check() == ([], [])
