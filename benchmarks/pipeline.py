"""Layers of a pipeline, whose stages hand on one tensor."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.decoder import DecoderShape, Layer, rotary_tables


class PipelineLayer(nn.Module):
    """A decoder layer that makes its own rotary tables, since a stage hands on one tensor."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.layer = Layer(shape)
        self.half = shape.hidden // shape.heads // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, *rotary_tables(self.half, x.shape[1], x))
        return out


class Head(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
