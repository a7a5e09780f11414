"""Models by their number of parameters: what crosses the link depends on it, and little else does."""

import torch
from torch import Tensor, nn

from .settings import Model


def build(model: Model) -> nn.Module:
    return _gpt(model.width) if model.kind == "gpt" else _cnn(model.width)


def batch(model: Model) -> Tensor:
    return torch.randn(model.batch_size, *([model.width] if model.kind == "gpt" else [model.width, 16, 16]))


class Block(nn.Module):
    """The four linear layers of a GPT's block, with their shapes; attention itself has no parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.project(value * torch.sigmoid(query * key))
        thought: Tensor = self.contract(nn.functional.gelu(self.expand(self.norm2(x))))
        return x + thought


def _gpt(width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(6)))


def _cnn(width: int) -> nn.Module:
    layers = (nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(8))
    return nn.Sequential(*layers)
