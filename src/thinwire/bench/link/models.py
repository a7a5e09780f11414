"""Models by their number of parameters: what crosses the link depends on it, and little else does."""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """kind   gpt: the linear layers of 6 blocks of a GPT; cnn: 8 convolutions of 16 x 16 images.
    parameters   about so many."""

    kind: str
    parameters: float
    batch_size: int

    def build(self) -> nn.Module:
        return _gpt(self._width) if self.kind == "gpt" else _cnn(self._width)

    def batch(self) -> Tensor:
        return torch.randn(self.batch_size, *([self._width] if self.kind == "gpt" else [self._width, 16, 16]))

    @property
    def _width(self) -> int:
        per_square = 6 * 12 if self.kind == "gpt" else 8 * 9
        return max(8, 8 * round(sqrt(self.parameters / per_square) / 8))


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
