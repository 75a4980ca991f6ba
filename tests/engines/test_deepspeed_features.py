"""What DeepSpeed brings along beside its engines, on two ranks: the same bits with offloading, or refused by name.

The table "DeepSpeed's own features" in docs/composition.md has a line for each of them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups, safe_get_full_grad
from torch import Tensor, nn

import ds_fgoffload
from ds_fgoffload.saved.tensors import same_bits
from tests.helpers.distributed import Outcome, run_cases

WIDTH, HEADS, LENGTH, SEQUENCES, VOCABULARY, LAYERS = 16, 2, 8, 2, 11, 2
STEPS, ACCUMULATION = 2, 2


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

        return SequenceTiledCompute.apply(tile, LENGTH, 2, ["x", "y"], [], "x", [self.head.weight], 0, "mean", x, y)


class LoraLinear(nn.Module):
    """A frozen linear layer with a low-rank part that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(self.dropout(x)))


class LigerMlp(nn.Module):
    """Its backward writes over what it has saved."""

    def __init__(self) -> None:
        super().__init__()
        from liger_kernel.transformers import LigerSwiGLUMLP

        self.mlp = LigerSwiGLUMLP(SimpleNamespace(hidden_size=WIDTH, intermediate_size=2 * WIDTH, hidden_act="silu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class LigerLoss(Loss):
    """Writes the gradient over the logits in forward, and saves that."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        from liger_kernel.transformers import LigerCrossEntropyLoss

        return LigerCrossEntropyLoss()(self.head(x).flatten(0, -2), y.flatten())


class LigerFusedLoss(Loss):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss()(self.head.weight, x.flatten(0, -2), y.flatten())


def liger(loss: Callable[[], nn.Module]) -> nn.Module:
    from liger_kernel.transformers import LigerRMSNorm

    model = Model(lambda: Attention(Core()), LigerMlp, loss())
    for layer in model.layers:
        layer.norm1, layer.norm2 = LigerRMSNorm(WIDTH), LigerRMSNorm(WIDTH)
    return model


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


NORMS, ACTIVATIONS = "layers.*norm?", "*.act"
CHEAP = (NORMS, ACTIVATIONS)


@dataclass
class Feature:
    """A feature of DeepSpeed, and what units of ours do with it."""

    zero: dict[str, Any] = field(default_factory=lambda: {"stage": 1})
    config: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = plain_model
    offloaded: str = "re:layers\\.[0-9]+"
    recompute: tuple[str, ...] = (*CHEAP, "re:layers\\.[0-9]+\\.mlp")
    """The last one contains what is special."""
    calls: int = 3 * LAYERS
    """Calls that are made again in a micro-batch; a unit inside a unit is part of it."""
    calls_at_first: int = 0
    """Calls that are made again in the first micro-batch alone: of what is refused only when it has been called."""
    refused: str = ""
    """Why what is special is not recomputed, if it is not."""
    gradients: bool = True
    """False: DeepSpeed does not give them out here, and weights alone are compared."""
    parameter_groups: Callable[[nn.Module], Any] | None = None
    optimizer: str = ""
    """The class that DeepSpeed wraps the optimizer in."""
    same_data: bool = False
    """Ranks have the same data."""
    sequence_parallel: bool = False
    stepping: str = "engine"
    steps: int = STEPS
    overflows: bool = False
    """Steps are skipped, though not all, because the loss was scaled by too much."""
    compiled: bool = False
    package: str = ""
    """What has to be installed."""
    full: bool = False
    """Much like another one, and so run by ``pytest -m full`` only."""


def is_installed(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


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
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
SPLIT: dict[str, Any] = {
    "recompute": (*CHEAP, "re:layers\\.[0-9]+\\.attention"),
    "calls": 4 * LAYERS,
    "sequence_parallel": True,
    "same_data": True,
}

FEATURES: dict[str, Feature] = {
    "moe, tokens dropped": Feature(
        model=partial(with_mlp, partial(Experts, drop_tokens=True, k=1)),
        parameter_groups=expert_groups,
        recompute=(NORMS, "re:layers\\.[0-9]+\\.mlp"),
        calls=2 * LAYERS,
        refused="sets the attribute",  # the router's loss
    ),
    "moe, no token dropped": Feature(
        {"stage": 2},
        model=partial(with_mlp, partial(Experts, drop_tokens=False, k=2)),
        parameter_groups=expert_groups,
        recompute=(NORMS, "*.experts"),
    ),
    "tiled mlp, zero2": Feature({"stage": 2}, model=partial(with_mlp, Tiled)),
    "tiled mlp, zero3": Feature({"stage": 3}, model=partial(with_mlp, Tiled), full=True),
    **{
        f"tiled logits loss, zero{stage}": Feature(
            {"stage": stage},
            model=partial(with_loss, TiledLoss),
            recompute=(*CHEAP, "loss"),
            refused="runs a backward",
            full=stage == 3,
        )
        for stage in (1, 3)
    },
    "sequence tiled loss": Feature(
        {"stage": 3}, model=partial(with_loss, SequenceTiledLoss), recompute=(*CHEAP, "loss")
    ),
    "optimizer on the host, zero2": Feature({"stage": 2, "offload_optimizer": CPU}, WEAK),
    "optimizer on the host, zero3": Feature({"stage": 3, "offload_optimizer": CPU}, WEAK, full=True),
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
    "fp16, zero2": Feature({"stage": 2}, FP16, steps=4, overflows=True),
    "fp16, zero3": Feature({"stage": 3}, FP16, steps=4, overflows=True, full=True),
    "lora, zero2": Feature({"stage": 2}, model=lora, calls=2 * LAYERS + 1),
    "lora, zero3": Feature(
        {"stage": 3, "stage3_param_persistence_threshold": 0}, model=lora, calls=2 * LAYERS + 1, full=True
    ),
    "peft, zero2": Feature({"stage": 2}, model=peft_lora, calls=3 * LAYERS - 1, package="peft", full=True),
    "peft, zero3": Feature(
        {"stage": 3, "stage3_param_persistence_threshold": 0},
        model=peft_lora,
        calls=3 * LAYERS - 1,
        package="peft",
    ),
    "boundary by hand": Feature({"stage": 2}, stepping="boundary"),
    "no_sync": Feature({"stage": 1}, stepping="no_sync"),
    "accelerate": Feature({"stage": 2}, stepping="accelerate", gradients=False, package="accelerate"),
    "engine.compile": Feature(
        compiled=True, offloaded="*", recompute=(*CHEAP, "*"), calls=0, refused="torch.compile has compiled"
    ),
    # what follows leaves groups of ranks behind
    "ulysses, zero2": Feature({"stage": 2}, model=ulysses, **SPLIT),
    "ulysses, zero3": Feature({"stage": 3}, model=ulysses, **SPLIT, full=True),
    "autotp": Feature(config=AUTOTP, same_data=True),
}

ON_A_DEVICE: dict[str, Feature] = {
    **{f"fp16, zero{stage}": Feature({"stage": stage}, FP16, steps=4, overflows=True) for stage in (1, 2, 3)},
    "liger": Feature({"stage": 2}, model=partial(liger, LigerFusedLoss), package="liger_kernel"),
    "liger, zero3": Feature({"stage": 3}, model=partial(liger, LigerFusedLoss), package="liger_kernel"),
    "liger cross entropy": Feature(
        {"stage": 2},
        model=partial(liger, LigerLoss),
        recompute=(NORMS, "loss.head"),
        calls=2 * LAYERS,
        calls_at_first=1,
        refused="its output is overwritten",
        package="liger_kernel",
    ),
}
"""What needs a GPU, or is another thing there."""


def section_of(feature: Feature, *, recomputes: bool) -> dict[str, Any]:
    recompute = list(feature.recompute) if recomputes else []
    return {"modules": [feature.offloaded], "recompute": recompute, "min_tensor_bytes": 0}


def micro_batches(feature: Feature) -> Iterator[Tensor]:
    rank = deepspeed.comm.get_rank()
    for number in range(feature.steps * ACCUMULATION):
        seed = 10 * number + (0 if feature.same_data else rank)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(seed))
        tokens = tokens.to(get_accelerator().current_device_name())
        yield tokens.chunk(2, dim=1)[rank] if feature.sequence_parallel else tokens


def make_engine(feature: Feature, config: dict[str, Any]) -> Any:
    options: dict[str, Any] = {}
    if feature.sequence_parallel:
        parallel_state_sp._release_sequence_parallel_groups()
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
        options["mpu"] = parallel_state_sp
    model = feature.model()
    parameters = model.parameters() if feature.parameter_groups is None else feature.parameter_groups(model)
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    engine = ds_fgoffload.initialize(model=model, optimizer=optimizer, config=config, **options)[0]
    assert feature.optimizer in type(engine.optimizer).__name__
    if feature.compiled:
        engine.compile(backend="eager")
    return engine


def train(feature: Feature, section: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    """Losses, and at each step gradients and weights; and what was counted."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": dict(feature.zero),
        "zero_allow_untested_optimizer": True,
        **feature.config,
    }
    if section is not None:
        config["fine_grained_offload"] = section
    torch.manual_seed(0)
    if feature.stepping == "accelerate":
        return train_with_accelerate(feature, config)
    engine = make_engine(feature, config)
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
            if feature.gradients:
                found += gradients_of(engine)
            engine.step()
            found += weights_of(engine)
        elif feature.stepping != "boundary":
            engine.step()
    assert engine.global_steps == feature.steps
    assert (0 < engine.skipped_steps < feature.steps) if feature.overflows else not engine.skipped_steps
    return end(engine, found)


def train_with_accelerate(feature: Feature, config: dict[str, Any]) -> tuple[list[Tensor], Any]:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    section = config.pop("fine_grained_offload", None)
    with mock.patch.dict(os.environ, ACCELERATE_USE_DEEPSPEED="true"):
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
        accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
        model = feature.model()
        engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if section is not None:
        ds_fgoffload.attach(engine, section)
    torch.manual_seed(1)
    found: list[Tensor] = []
    for number, tokens in enumerate(micro_batches(feature)):
        is_last = number % ACCUMULATION == ACCUMULATION - 1
        with nullcontext() if is_last else accelerator.no_sync(engine):
            accelerator.gradient_state._set_sync_gradients(is_last)
            loss = engine(tokens)
            accelerator.backward(loss)
        found.append(loss.detach().clone())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            found += weights_of(engine)
    assert engine.global_steps == feature.steps
    for state in states:
        state._reset_state()
    return end(engine, found)


def gradients_of(engine: Any) -> list[Tensor]:
    found = [safe_get_full_grad(p) for p in engine.module.parameters() if p.requires_grad]
    return [gradient.clone() for gradient in found if gradient is not None]


def weights_of(engine: Any) -> list[Tensor]:
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    with deepspeed.zero.GatheredParameters(trained):
        return [p.detach().clone() for p in trained]


def end(engine: Any, found: list[Tensor]) -> tuple[list[Tensor], Any]:
    offload = ds_fgoffload.get(engine)
    stats = None if offload is None else offload.stats()
    engine.destroy()
    groups.mpu = groups.mesh_device = None
    torch._dynamo.reset()
    return [*found, torch.get_rng_state(), get_accelerator().get_rng_state()], stats


@cache
def plain(name: str, on_a_device: bool) -> list[Tensor]:
    return train((ON_A_DEVICE if on_a_device else FEATURES)[name], None)[0]


def compare(name: str, recomputes: bool, on_a_device: bool = False) -> list[str]:
    """What is wrong, once both have trained: a rank that raised would leave its peer in a collective."""
    feature = (ON_A_DEVICE if on_a_device else FEATURES)[name]
    expected = plain(name, on_a_device)
    found, stats = train(feature, section_of(feature, recomputes=recomputes))
    wrong: list[str] = []
    if len(found) != len(expected):
        wrong.append(f"{len(found)} results instead of {len(expected)}")
    # same_bits, because gradients of fp16 that overflow are not numbers, and those equal nothing
    differing = [number for number, pair in enumerate(zip(found, expected, strict=False)) if not same_bits(*pair)]
    if differing:
        wrong.append(f"results {differing} of {len(found)} differ")
    refused = {name: unit.recompute_refused for name, unit in stats.units.items() if unit.recompute_refused}
    reason = feature.refused if recomputes else ""
    if bool(refused) != bool(reason) or any(reason not in refusal for refusal in refused.values()):
        wrong.append(f"refused {refused}, not because {reason!r}")
    calls = feature.steps * ACCUMULATION * feature.calls + feature.calls_at_first if recomputes else 0
    if stats.recomputations != calls or bool(stats.recomputed_bytes) != bool(calls):
        wrong.append(f"{stats.recomputations} recomputations of {stats.recomputed_bytes} bytes instead of {calls}")
    if not stats.offloaded_bytes or stats.live_host_bytes:
        wrong.append(f"{stats.offloaded_bytes} bytes went to the host and {stats.live_host_bytes} stayed there")
    return wrong


CASES = {f"{name}{', recompute' * recomputes}": (name, recomputes) for name in FEATURES for recomputes in (False, True)}


def marked(case: str, feature: Feature) -> Any:
    marks: list[Any] = [pytest.mark.full] if feature.full else []
    if not is_installed(feature.package):
        marks.append(pytest.mark.skip(reason=f"{feature.package} is not installed"))
    return pytest.param(case, marks=marks)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Of the cases that this run has chosen."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = {item.callspec.params.get("case") for item in here if not item.get_closest_marker("skip")}
    return run_cases(compare, {case: of for case, of in CASES.items() if case in chosen})


@pytest.mark.ranks
@pytest.mark.parametrize("case", [marked(case, FEATURES[of[0]]) for case, of in CASES.items()])
def test_the_same_bits_or_refused(case: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[case].check() == ([], [])


@pytest.fixture(scope="module")
def _device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes this process the only rank of a group of the device's."""
    linear = F.linear  # which ZeRO-3 replaces for good
    store = f"file://{tmp_path_factory.mktemp('store') / 'store'}"
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, variables):
        backend = get_accelerator().communication_backend_name()
        torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        deepspeed.init_distributed(backend, verbose=False)
        yield
        deepspeed.comm.destroy_process_group()
    F.linear = linear


@pytest.mark.gpu
@pytest.mark.skipif(get_accelerator().device_name() != "cuda", reason="needs a GPU")
@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("recomputes", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("name", [marked(name, feature) for name, feature in ON_A_DEVICE.items()])
def test_the_same_bits_on_a_device(name: str, recomputes: bool) -> None:
    assert compare(name, recomputes, on_a_device=True) == []


def test_the_table_has_a_line_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs/composition.md").read_text(encoding="utf-8")
    section = page.partition("## DeepSpeed's own features")[2].partition("\n## ")[0]
    last = [line.split("|")[-2] for line in section.splitlines() if "|" in line]
    names = {name for cell in last for name in re.findall(r"`([^`]+)`", cell) if "::" not in name}
    assert names == set(FEATURES) | {name for name in ON_A_DEVICE if name.startswith("liger")}
