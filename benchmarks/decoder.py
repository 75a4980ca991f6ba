"""A Llama-shaped decoder in plain PyTorch, with the names that the configuration examples use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DecoderShape:
    """Sizes in elements; the defaults are those of a 1.1B-parameter Llama."""

    hidden: int = 2048
    intermediate: int = 5632
    layers: int = 22
    heads: int = 32
    key_value_heads: int = 4
    vocabulary: int = 32000


class Attention(nn.Module):
    """Causal attention with grouped keys and values, and rotary positions."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.head = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.key_value_heads * self.head, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.key_value_heads * self.head, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, -1, self.head).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        merged: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return merged


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.attn_norm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Stack(nn.Module):
    """Tokens (batch, length) in, mean cross-entropy of the next token out, through ``layers``."""

    def __init__(self, shape: Any, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def rotary(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for the layers."""
        return rotary_tables(self.shape.hidden // self.shape.heads // 2, length, like)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


class Decoder(Stack):
    """Of the layers above."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape, (Layer(shape) for _ in range(shape.layers)))


def rotary_tables(half: int, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (length, half of what is rotated of a head) on the device and in the dtype of ``like``."""
    positions = torch.arange(length, device=like.device)
    angles = torch.outer(positions, 10000.0 ** (-torch.arange(half, device=like.device) / half))
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
