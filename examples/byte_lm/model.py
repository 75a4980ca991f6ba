"""A byte-level decoder transformer in plain PyTorch: nothing here knows about DeepSpeed or offloading."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ByteLMShape:
    """The sizes of the model; the defaults give 6.5 million parameters."""

    layers: int = 8
    width: int = 256
    heads: int = 8
    mlp_width: int = 704
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} does not split into {self.heads} heads of even size; "
                f"choose a width that is a multiple of {2 * self.heads}"
            )


def rotary_angles(length: int, head_width: int, device: torch.device) -> Tensor:
    """The cosine and the sine of each position's angles: [2, length, head_width / 2]."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the halves of each head of ``x`` [batch, head, position, head_width] against each other."""
    cos, sin = angles.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: ByteLMShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv: Tensor = self.qkv(x)
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class SwiGLU(nn.Module):
    """The gated MLP: three products, and the largest activations of a layer."""

    def __init__(self, shape: ByteLMShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind its norm and beside a residual connection."""

    def __init__(self, shape: ByteLMShape) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.width)
        self.attn = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), angles)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ByteLM(nn.Module):
    """Predicts the next byte; called with targets, it returns the mean loss in nats."""

    def __init__(self, shape: ByteLMShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        angles = rotary_angles(tokens.shape[1], self.shape.width // self.shape.heads, tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        logits: Tensor = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)  # large enough that the first steps move the layers, not the embedding
