"""A DeepSeek-V3-shaped stack in plain PyTorch: multi-head latent attention, routed and shared experts, no host reads.

What a layer saves for backward at 4096 tokens in bf16, by hand, in MiB (:func:`saved_mib` has the formulas):

=============================  ======  ================================================================================
module                            MiB  what
=============================  ======  ================================================================================
``input_layernorm``                56  its input, the residual stream
``self_attn``                     984  the norm's output 56; inputs and outputs of the ranks' two norms 32; q, k, v
                                       and the output of attention, all 192 wide, 768; input of ``o_proj`` 128
``post_attention_layernorm``       56  its input
``mlp.router``                     56  the norm's output, which the shared expert saves, too
``mlp.experts.fc1``               448  its input: 8 rows of 7168 for each token
``mlp.experts.act``               384  gate and up in one storage 256, silu(gate) 128
``mlp.experts.fc2``               128  its input
``mlp`` itself                    448  what the experts returned, for the gradient of the router's weights
``mlp.shared_experts``             64  gate and up 32, silu(gate) 16, input of ``fc2`` 16
=============================  ======  ================================================================================

That is 2.56 GiB a layer; the two norms, ``fc1`` and ``act`` are 944 MiB (0.92 GiB) of it. Eight layers, the final norm
and the logits are 21 GiB; what backward has beside them at its beginning makes the peak higher.

Rows are brought into the order of the experts and back by gathers alone, in backward too: nothing is added up by atomic
operations, and the indices are all that is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.decoder import Stack, rotary_tables, rotate

MIB = 2**20


@dataclass(frozen=True)
class DeepSeekShape:
    """Sizes in elements; the defaults are DeepSeek-V3's with the 16 experts that one rank of 16 holds."""

    hidden: int = 7168
    layers: int = 8
    vocabulary: int = 32000
    heads: int = 128
    query_rank: int = 1536
    key_value_rank: int = 512
    plain_head: int = 128
    """The part of a head's query and key that is not rotated."""
    rotary_head: int = 64
    value_head: int = 128
    experts: int = 16
    experts_per_token: int = 8
    intermediate: int = 2048


TINY = DeepSeekShape(
    hidden=64,
    layers=2,
    vocabulary=128,
    heads=4,
    query_rank=32,
    key_value_rank=16,
    plain_head=16,
    rotary_head=8,
    value_head=16,
    experts=4,
    experts_per_token=2,
    intermediate=32,
)


def saved_mib(shape: DeepSeekShape, tokens: int) -> dict[str, float]:
    """MiB of distinct storages in bf16 that one layer saves for backward, by module, without indices and statistics."""
    head = shape.plain_head + shape.rotary_head
    rows = tokens * shape.experts_per_token
    elements = {
        "input_layernorm": tokens * shape.hidden,
        "self_attn": tokens
        * (
            shape.hidden
            + 2 * shape.query_rank
            + 2 * shape.key_value_rank
            + 4 * shape.heads * head
            + shape.heads * shape.value_head
        ),
        "post_attention_layernorm": tokens * shape.hidden,
        "mlp.router": tokens * shape.hidden,
        "mlp.experts.fc1": rows * shape.hidden,
        "mlp.experts.act": rows * 3 * shape.intermediate,
        "mlp.experts.fc2": rows * shape.intermediate,
        "mlp": rows * shape.hidden,
        "mlp.shared_experts": tokens * 4 * shape.intermediate,
    }
    return {name: 2 * count / MIB for name, count in elements.items()}


class LatentAttention(nn.Module):
    """Causal attention whose queries, keys and values come out of low-rank projections."""

    def __init__(self, shape: DeepSeekShape) -> None:
        super().__init__()
        self.shape = shape
        self.head = shape.plain_head + shape.rotary_head
        self.q_a_proj = nn.Linear(shape.hidden, shape.query_rank, bias=False)
        self.q_a_norm = nn.RMSNorm(shape.query_rank)
        self.q_b_proj = nn.Linear(shape.query_rank, shape.heads * self.head, bias=False)
        self.kv_a_proj = nn.Linear(shape.hidden, shape.key_value_rank + shape.rotary_head, bias=False)
        self.kv_a_norm = nn.RMSNorm(shape.key_value_rank)
        self.kv_b_proj = nn.Linear(
            shape.key_value_rank, shape.heads * (shape.plain_head + shape.value_head), bias=False
        )
        self.o_proj = nn.Linear(shape.heads * shape.value_head, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape, (batch, length, _) = self.shape, x.shape
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).view(batch, length, shape.heads, self.head)
        q_plain, q_rotary = q.split((shape.plain_head, shape.rotary_head), dim=-1)
        latent, k_rotary = self.kv_a_proj(x).split((shape.key_value_rank, shape.rotary_head), dim=-1)
        # the norm's kernel wants rows without gaps between them
        kv = self.kv_b_proj(self.kv_a_norm(latent.contiguous()))
        k_plain, v = kv.view(batch, length, shape.heads, -1).split((shape.plain_head, shape.value_head), dim=-1)
        k_rotary = rotate(k_rotary.unsqueeze(2), cos, sin).expand(-1, -1, shape.heads, -1)
        q = torch.cat((q_plain, rotate(q_rotary, cos, sin)), dim=-1)
        k = torch.cat((k_plain, k_rotary), dim=-1)
        # Flash attention wants the three equally wide; zeros behind the values change nothing in front of them.
        v = F.pad(v, (0, self.head - shape.value_head))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        merged = out[..., : shape.value_head].transpose(1, 2).reshape(batch, length, -1)
        projected: torch.Tensor = self.o_proj(merged)
        return projected


class _GroupedProduct(torch.autograd.Function):
    """Rows of each expert times its weights; saves the rows and the weights as they are, as Megatron's layer does."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, ends)
        if rows.is_cuda:
            return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
        parts = [rows[a:b] @ weight[i].t() for i, a, b in _ranges(ends)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        if rows.is_cuda:
            return (
                torch._grouped_mm(gradient, weight, offs=ends),
                # the operand that is not row-major and the one that is need no alignment of the experts' rows
                torch._grouped_mm(gradient.t(), rows, offs=ends),
                None,
            )
        ranges = _ranges(ends)
        return (
            torch.cat([gradient[a:b] @ weight[i] for i, a, b in ranges]),
            torch.stack([gradient[a:b].t() @ rows[a:b] for _, a, b in ranges]),
            None,
        )


def _ranges(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    stops = ends.tolist()
    return list(zip(range(len(stops)), [0, *stops[:-1]], stops, strict=True))


class GroupedLinear(nn.Module):
    """One linear layer for each expert, in one product: rows (tokens' copies, in) sorted by expert -> (.., out)."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _GroupedProduct.apply(rows, self.weight, ends)
        return out


class SwiGLU(nn.Module):
    """Gate and up side by side in, silu(gate) * up out."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class Experts(nn.Module):
    """The routed experts, over rows that are sorted by expert."""

    def __init__(self, shape: DeepSeekShape) -> None:
        super().__init__()
        self.fc1 = GroupedLinear(shape.experts, shape.hidden, 2 * shape.intermediate)
        self.act = SwiGLU()
        self.fc2 = GroupedLinear(shape.experts, shape.intermediate, shape.hidden)

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(rows, ends)), ends)
        return out


class SharedExpert(nn.Module):
    def __init__(self, shape: DeepSeekShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.act = SwiGLU()
        self.fc2 = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Routes(NamedTuple):
    """Where each token's copies go; a copy is (token, one of its experts), numbered token by token."""

    weights: torch.Tensor
    """(tokens, experts per token)."""
    order: torch.Tensor
    """The copy that stands in each row, rows sorted by expert."""
    row: torch.Tensor
    """The row in which each copy stands."""
    ends: torch.Tensor
    """For each expert the row after its last."""


class Router(nn.Module):
    """Chooses each token's experts, on the device alone unless ``reads_counts``."""

    def __init__(self, shape: DeepSeekShape) -> None:
        super().__init__()
        self.experts_per_token = shape.experts_per_token
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.reads_counts = False
        """Whether the host reads the tokens per expert at each call, and so waits for the device."""
        self.counts: list[int] = []

    def forward(self, x: torch.Tensor) -> Routes:
        probabilities = F.softmax(self.gate(x).float(), dim=-1)
        weights, experts = probabilities.topk(self.experts_per_token, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        chosen, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(self.gate.out_features, device=x.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        if self.reads_counts:
            tokens_per_expert = torch.diff(ends, prepend=ends.new_zeros(1))
            self.counts = tokens_per_expert.tolist()
        return Routes(weights, order, order.argsort(), ends)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        ctx.save_for_backward(routes.row)
        ctx.copies = routes.weights.shape[1]
        return x.index_select(0, routes.order // ctx.copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (row,) = ctx.saved_tensors
        return gradient.index_select(0, row).unflatten(0, (-1, ctx.copies)).sum(1), None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        ctx.save_for_backward(routes.order)
        return rows.index_select(0, routes.row)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order), None


class MoE(nn.Module):
    """Routed experts and a shared one."""

    def __init__(self, shape: DeepSeekShape) -> None:
        super().__init__()
        self.router = Router(shape)
        self.experts = Experts(shape)
        self.shared_experts = SharedExpert(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        routes = self.router(flat)
        rows = _ToExperts.apply(flat, routes)
        rows = self.experts(rows, routes.ends)
        copies = _FromExperts.apply(rows, routes).unflatten(0, routes.weights.shape)
        routed = (copies * routes.weights.unsqueeze(-1)).sum(1)
        out: torch.Tensor = (routed + self.shared_experts(flat)).view(x.shape)
        return out


class Layer(nn.Module):
    """Pre-norm attention and experts."""

    def __init__(self, shape: DeepSeekShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden)
        self.self_attn = LatentAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden)
        self.mlp = MoE(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DeepSeek(Stack):
    """Of the layers above."""

    def __init__(self, shape: DeepSeekShape) -> None:
        super().__init__(shape, (Layer(shape) for _ in range(shape.layers)))

    def read_counts(self, reads: bool) -> None:
        """Whether every router makes the host wait for the number of tokens per expert."""
        for module in self.modules():
            if isinstance(module, Router):
                module.reads_counts = reads

    def rotary(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(self.shape, length, like)


def rotary(shape: DeepSeekShape, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (length, 1, half of the rotary head): heads are the last but one dimension here."""
    cos, sin = rotary_tables(shape.rotary_head // 2, length, like)
    return cos.unsqueeze(1), sin.unsqueeze(1)
