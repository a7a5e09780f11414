"""Builds models of a given number of parameters. The bytes sent depend on this number and on little else."""

import torch
from torch import Tensor, nn

from .settings import Model


def build(model: Model) -> nn.Module:
    """Build the model."""
    return _gpt(model.width) if model.kind == "gpt" else _cnn(model.width)


def batch(model: Model) -> Tensor:
    """Return a random batch of inputs for the model."""
    return torch.randn(model.batch_size, *([model.width] if model.kind == "gpt" else [model.width, 16, 16]))


class Block(nn.Module):
    """The four linear layers of a GPT block. Attention itself is left out, because it has no parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers, with an elementwise gate in place of attention."""
        query, key, value = self.attention(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.project(value * torch.sigmoid(query * key))
        thought: Tensor = self.contract(nn.functional.gelu(self.expand(self.norm2(x))))
        return x + thought


def _gpt(width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(6)))


def _cnn(width: int) -> nn.Module:
    layers = (nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(8))
    return nn.Sequential(*layers)
