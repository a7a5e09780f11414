"""A CNN for small images."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .seeded import SeededModel


@dataclass(frozen=True)
class CNNConfig:
    """Options of the CNN."""

    name: ClassVar = "cnn"

    width: int = 32
    """Channels of the first layer; the next ones have 2 and 4 times as many."""
    size: int = 8
    """Height and width of the images in pixels."""
    classes: int = 10
    channels: int = 1
    """Channels of the images: 1 if they are grey, 3 if they have colours."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.classes < 2:
            raise ValueError(f"width {self.width} and {self.classes} classes, expected 1 and 2 or more")
        if self.channels < 1:
            raise ValueError(f"{self.channels} channels, expected 1 or more")
        if self.size < 4 or self.size % 4:
            raise ValueError(f"images of {self.size} pixels, expected a multiple of 4")

    @property
    def inputs(self) -> tuple[int, int, int]:
        """Return the shape of an image: channels, height and width."""
        return self.channels, self.size, self.size

    def build(self, seed: int) -> "SimpleCNN":
        """Return a new model with weights that depend only on the seed."""
        return SimpleCNN.from_seed(self, seed)


class SimpleCNN(SeededModel):
    """Three convolutions, the last two with a group norm and a max pool of 2 x 2, and two linear layers."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        width, rest = config.width, config.size // 4
        self.conv1 = nn.Conv2d(config.channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.norm2, self.norm3 = nn.GroupNorm(1, 2 * width), nn.GroupNorm(1, 4 * width)
        self.hidden = nn.Linear(4 * width * rest * rest, 4 * width)
        self.head = nn.Linear(4 * width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes; images are (batch, channels, size, size)."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        scores: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return scores

    def initialise(self, generator: torch.Generator) -> None:
        """Give every parameter its initial value."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
