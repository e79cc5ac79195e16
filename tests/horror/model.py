"""One small model that holds at once what broke sharding somewhere: ties, odd sizes, frozen integers, unused branches.

Shapes: B batch, T tokens, W width (5), V symbols (11).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

WIDTH = 5
HIDDEN = 7
RANK = 1
SYMBOLS = 11
TOKENS = 6


@dataclass
class Output:
    """logits (B, T, V), score (B,), and how many blocks ran."""

    logits: Tensor
    score: Tensor
    depth: int


class Quantised(nn.Module):
    """A Linear whose frozen weight is uint8 beside a scale for each row, which is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(256, (outputs, inputs), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(0.5 + torch.rand(outputs, 1))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.to(self.scale.dtype) / 128 - 1) * self.scale
        return nn.functional.linear(x, weight, self.bias)


class LoRA(nn.Module):
    """A frozen Linear and a trained product of rank 1 beside it, which starts as zeros."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        self.A = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.B = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        return linear(x, self.weight) + linear(linear(x, self.A), self.B)


class Block(nn.Module):
    """(B, T, W) -> the same. Five FlatParameters' worth of kinds in one unit, and a branch that some calls leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=0.1)
        self.up = Quantised(WIDTH, HIDDEN)
        self.down = LoRA(HIDDEN, WIDTH)
        self.gate = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.extra = nn.Linear(WIDTH, 1)
        self.dropout = nn.Dropout(0.5)  # keeps and doubles, which is exact in every dtype

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        h = self.norm(x)
        h = self.down(torch.tanh(self.up(h))) * torch.sigmoid(self.gate(h))
        if extra:
            h = h + torch.tanh(self.extra(x))
        return x + self.dropout(h)


class Horror(nn.Module):
    """Tokens (B, T) and images (B, 3, 4, 4) -> `Output`.

    `spare` is never used, `score` is left out by some losses on some ranks, each block's `extra` by some calls. The first
    block runs twice. `peak`, not in the state dict, is the largest activation that this rank has seen.
    """

    peak: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.conv = nn.Conv2d(3, WIDTH, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.batch_norm = nn.BatchNorm2d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH, eps=0.1)
        self.score = nn.Linear(WIDTH, 1)
        self.spare = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("peak", torch.zeros(()), persistent=False)

    def forward(self, tokens: Tensor, image: Tensor, extra: bool = False) -> Output:
        seen = torch.relu(self.batch_norm(self.conv(image))).mean((2, 3))
        x = self.embed(tokens) * self.scale + seen.unsqueeze(1) + self.empty.sum()
        path = (0, 1, 0)
        for i in path:
            x = self.blocks[i](x, extra)
        with torch.no_grad():
            self.peak.copy_(torch.maximum(self.peak, x.abs().max().to(self.peak.dtype)))
        x = self.norm(x)
        return Output(self.head(x), self.score(x[:, -1]).squeeze(-1), len(path))
