"""A byte-level GPT."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .seeded import SeededModel

VOCABULARY = 256
"""Number of different tokens, which are bytes."""


@dataclass(frozen=True)
class GPTConfig:
    """Options of the GPT."""

    name: ClassVar = "gpt"

    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 64
    """Number of bytes that the model sees at once."""
    bias: int = 0
    """1 if layers and norms have biases, as in GPT-2; 0 if not, as in later models."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}, expected 1 or more")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} with {self.heads} heads, expected a multiple of the heads")

    def build(self, seed: int) -> "GPT":
        """Return a new model with weights that depend only on the seed."""
        return GPT.from_seed(self, seed)


class Block(nn.Module):
    """Attention and a feed-forward network, each after a layer norm and with a skip connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        bias = bool(config.bias)
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.attention, self.project = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.expand, self.contract = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block; x is (batch, length, width)."""
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.attention(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        thought: Tensor = self.contract(F.gelu(self.expand(self.norm2(x))))
        return x + thought


class GPT(SeededModel):
    """Pre-norm transformer over bytes, with initial weights as in nanoGPT.

    Weights are normal with standard deviation 0.02. It is 0.02 / sqrt(2 * layers) for `project` and `contract`, the
    layers whose output is added to a skip connection.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=bool(config.bias))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next byte at each position; tokens are (batch, length) of int64."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def initialise(self, generator: torch.Generator) -> None:
        """Give every parameter its initial value."""
        into_skips = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                std = into_skips if name.endswith(("project.weight", "contract.weight")) else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)
