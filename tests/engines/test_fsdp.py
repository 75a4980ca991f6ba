"""A model sharded by torch's fully_shard, on two ranks: the same bits, or refused by name."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ds_fgoffload
from tests.helpers.distributed import run_cases

WIDTH, STEPS = 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


def sharded(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH))
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))}
    if kind == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "kept":
        options["reshard_after_forward"] = False
    for block in list(model)[:3]:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def train(kind: str, section: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    model = sharded(kind)
    attachment = None if section is None else ds_fgoffload.attach(model, section)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step in range(STEPS):
        seed = 10 * step + deepspeed.comm.get_rank()
        x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = sum((model(part).float().square().mean() for part in x), torch.zeros(()))  # two micro-batches at once
        loss.backward()
        found.append(loss.detach())
        found += [p.grad.full_tensor().clone() for p in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    stats = None if attachment is None else attachment.stats()
    if attachment is not None:
        attachment.detach()
    return found, stats


CHEAP = ["*.norm", "*.act"]
SECTIONS: dict[str, dict[str, Any]] = {
    "offload": {"modules": ["*"]},
    "recompute": {"recompute": CHEAP},
    "both": {"recompute": CHEAP, "modules": ["*"]},
}


def run(kind: str, section: str) -> None:
    if section == "refused":
        for pattern, name in (("[0-9]", "{0..2}"), ("re:^$", "the root")):
            with pytest.raises(ds_fgoffload.OffloadConfigError, match=r"sharded by FSDP") as raised:
                ds_fgoffload.attach(sharded(kind), {"recompute": [pattern], "exclude": ["3"]})
            assert name in str(raised.value)
        return
    expected, _ = train(kind, None)
    found, stats = train(kind, {"min_tensor_bytes": 0, **SECTIONS[section]})
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"result {number} of {len(found)} differs"
    assert not [unit for unit in stats.units.values() if unit.recompute_refused]
    assert stats.recomputations == (0 if section == "offload" else STEPS * 2 * 6)
    assert (stats.offloaded_bytes > 0) == ("modules" in SECTIONS[section])
    assert stats.live_host_bytes == 0


CASES = {
    f"{kind}-{section}": (kind, section)
    for kind, sections in {"plain": [*SECTIONS, "refused"], "bf16": SECTIONS, "kept": SECTIONS}.items()
    for section in sections
}


@pytest.fixture(scope="module")
def outcomes() -> Any:
    return run_cases(run, CASES)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_or_refused(case: str, outcomes: Any) -> None:
    outcomes[case].check()
