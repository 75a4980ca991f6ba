"""Recomputation under DeepSpeed's engines on two ranks: the same bits, parameters gathered, each call again once."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules
from torch import Tensor, nn

import ds_fgoffload
from tests.helpers.distributed import run_cases

WIDTH, STEPS, ACCUMULATION = 16, 3, 2


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.norm2, self.mlp = (
            Norm(),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            Mlp(),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + torch.softmax(self.q(h), -1) * self.k(h)
        return x + self.mlp(self.norm2(x))


CHEAP = ["*.norm", "*.norm2", "*.act", "*.drop"]
SELECTIONS: dict[str, dict[str, Any]] = {
    "cheap": {"recompute": CHEAP},
    "mlp": {"recompute": ["*.mlp", "*.norm"], "modules": ["*.mlp"]},
    "layers": {"recompute": ["re:[0-9]"], "modules": ["*"], "min_tensor_bytes": 0},
}
MADE_AGAIN = {"cheap": 2 * 4, "mlp": 2 * 2, "layers": 2}
"""Calls per micro-batch."""
ZERO = {
    "all partitioned": {"stage3_param_persistence_threshold": 0},
    "small ones kept": {},
    "small ones kept, autocast": {},  # what is gathered once more comes in autocast's dtype
    "plain linear": {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False},
    "leaf mlps": {"stage3_param_persistence_threshold": 0},
    "leaf layers": {"stage3_param_persistence_threshold": 0},
    "first norm frozen": {"stage3_param_persistence_threshold": 0},
}


def micro_batch(number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + deepspeed.comm.get_rank()))


def train(stage: int, bf16: bool, zero: str, section: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    if zero.startswith("leaf"):
        set_z3_leaf_modules(model, [Mlp if zero == "leaf mlps" else Layer])
    model[0].norm.requires_grad_(zero != "first norm frozen")  # it has no backward then, but is made again
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **ZERO[zero]},
        "bf16": {"enabled": bf16},
    }
    if zero.endswith("autocast"):
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if section is not None:
        config["fine_grained_offload"] = section
    engine = ds_fgoffload.initialize(model=model, config=config)[0]
    torch.manual_seed(1)
    found: list[Tensor] = []
    dtype = torch.bfloat16 if bf16 else torch.float32
    for number in range(STEPS * ACCUMULATION):
        # DeepSpeed frees a leaf module's parameters too early if its input needs no gradient.
        inputs = micro_batch(number).to(dtype).requires_grad_(zero == "leaf layers")
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        found.append(loss.detach())
        parameters = [p for p in model.parameters() if hasattr(p, "ds_id")]
        assert not any(-1 in p.ds_active_sub_modules for p in parameters)
        if stage == 3 and "stage3_param_persistence_threshold" in ZERO[zero]:
            assert all(p.numel() == 0 for p in parameters), "a parameter was left gathered"
        if engine.is_gradient_accumulation_boundary():
            found += [safe_get_full_grad(p).clone() for p in model.parameters() if p.requires_grad]
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found += [p.detach().clone() for p in model.parameters()]
    found.append(torch.get_rng_state())
    offload = ds_fgoffload.get(engine)
    stats = None if offload is None else offload.stats()
    engine.destroy()
    return found, stats


def compare(stage: int, bf16: bool, zero: str, selection: str) -> None:
    expected, _ = train(stage, bf16, zero, None)
    found, stats = train(stage, bf16, zero, SELECTIONS[selection])
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"result {number} of {len(found)} differs"
    assert not [unit for unit in stats.units.values() if unit.recompute_refused]
    assert stats.recomputations == STEPS * ACCUMULATION * MADE_AGAIN[selection]
    assert stats.live_host_bytes == 0


CASES = {
    f"zero{stage}-{'bf16' if bf16 else 'fp32'}-{selection}-{zero}": (stage, bf16, zero, selection)
    for stage in range(4)
    for bf16 in (False, True)
    for zero in (ZERO if stage == 3 else ["small ones kept"])
    for selection in SELECTIONS
    if not (bf16 and zero.endswith("autocast"))  # DeepSpeed has either
}


def pipeline(bf16: bool, checkpoints: int, section: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Layer(), Layer(), Layer()]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), activation_checkpoint_interval=checkpoints,
                           partition_method="uniform")  # fmt: skip
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": bf16},
    }
    if section is not None:
        config["fine_grained_offload"] = section
    engine = ds_fgoffload.initialize(model=model, config=config)[0]
    torch.manual_seed(1)
    dtype = torch.bfloat16 if bf16 else torch.float32
    batches = [(torch.randn(3, WIDTH).to(dtype), torch.randn(3, WIDTH).to(dtype)) for _ in range(STEPS * 4)]
    data = iter(batches)
    found = [engine.train_batch(data).detach() for _ in range(STEPS)]
    found += [p.detach().clone() for p in model.parameters()]
    offload = ds_fgoffload.get(engine)
    stats = None if offload is None else offload.stats()
    engine.destroy()
    return found, stats


def compare_pipelines(bf16: bool, checkpoints: int) -> None:
    expected, _ = pipeline(bf16, checkpoints, None)
    found, stats = pipeline(bf16, checkpoints, {"recompute": CHEAP})
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"result {number} of {len(found)} differs"
    layers = 1 if deepspeed.comm.get_rank() == 0 else 2
    assert stats.recomputations == (0 if checkpoints else STEPS * 4 * layers * 4)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(96), nn.LayerNorm(96)
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(96, 288), nn.SiLU(), nn.Linear(288, 96))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def losses_under_autocast(section: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(50, 96), *(Attention() for _ in range(3)), nn.Linear(96, 50))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if section is not None:
        config["fine_grained_offload"] = section
    engine = ds_fgoffload.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    losses = []
    for number in range(6):
        seed = 1000 * deepspeed.comm.get_rank() + number
        tokens = torch.randint(0, 50, (4, 33), generator=torch.Generator().manual_seed(seed))
        logits = engine(tokens)[:, :-1].float().reshape(-1, 50)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    return losses


def compare_under_autocast() -> None:
    """A trace that DeepSpeed gives up lets go of parameters that persist, and they come back in autocast's dtype."""
    assert losses_under_autocast({"recompute": ["*.norm"]}) == losses_under_autocast(None)


AUTOCAST = "zero3-autocast-attention"
PIPELINES = {"pipeline-bf16": (True, 0), "pipeline-checkpointed": (False, 1)}
DIAGONAL = {
    "zero1-bf16-cheap-small ones kept",
    "zero2-fp32-layers-small ones kept",
    "zero3-fp32-cheap-small ones kept, autocast",
    "zero3-fp32-mlp-leaf mlps",
    "zero3-bf16-cheap-all partitioned",
    "zero3-fp32-cheap-leaf layers",
    "zero3-fp32-cheap-first norm frozen",
    "zero3-bf16-layers-plain linear",
}


def run(case: str) -> None:
    if case == AUTOCAST:
        compare_under_autocast()
    elif case in PIPELINES:
        compare_pipelines(*PIPELINES[case])
    else:
        compare(*CASES[case])


@pytest.fixture(scope="module")
def outcomes() -> Any:
    return run_cases(run, {case: (case,) for case in [*sorted(DIAGONAL), AUTOCAST, *PIPELINES]})


@pytest.fixture(scope="module")
def all_outcomes() -> Any:
    return run_cases(run, {case: (case,) for case in CASES}, timeout_s=900)


@pytest.mark.ranks
@pytest.mark.parametrize("case", [*sorted(DIAGONAL), AUTOCAST, *PIPELINES])
def test_the_same_bits(case: str, outcomes: Any) -> None:
    outcomes[case].check()


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_everywhere(case: str, all_outcomes: Any) -> None:
    all_outcomes[case].check()
