"""ResNet-18 for images of 32 x 32 (He et al., "Deep residual learning for image recognition", 2015).

As usual for small images, it begins with a convolution of 3 x 3, and not with one of 7 x 7 and a pool as in the paper.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .seeded import SeededModel


@dataclass(frozen=True)
class ResNet18Config:
    """Options of the ResNet-18."""

    name: ClassVar = "resnet18"
    inputs: ClassVar = (3, 32, 32)
    """Shape of an image: channels, height and width."""

    width: int = 64
    """Channels of the first stage; the next ones have 2, 4 and 8 times as many."""
    classes: int = 10

    def __post_init__(self) -> None:
        if self.width < 1 or self.classes < 2:
            raise ValueError(f"width {self.width} and {self.classes} classes, expected 1 and 2 or more")

    def build(self, seed: int) -> "ResNet18":
        """Return a new model with weights that depend only on the seed."""
        return ResNet18.from_seed(self, seed)


class Residual(nn.Module):
    """Two convolutions with a skip connection, which is a convolution of 1 x 1 where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.skip = nn.Sequential()
        if stride != 1 or channels != width:
            self.skip = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block; x is (batch, channels, height, width)."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.skip(x))


class ResNet18(SeededModel):
    """Four stages of two blocks. Each stage but the first halves the image and doubles the channels."""

    def __init__(self, config: ResNet18Config) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, config.width, 3, padding=1, bias=False), nn.BatchNorm2d(config.width)
        widths = [config.width << stage for stage in range(4)]
        self.stages = nn.Sequential()
        for before, width in zip([config.width, *widths], widths, strict=False):
            self.stages.append(Residual(before, width, stride=1 if width == config.width else 2))
            self.stages.append(Residual(width, width, stride=1))
        self.head = nn.Linear(widths[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes; images are (batch, 3, 32, 32)."""
        x = self.stages(F.relu(self.norm(self.stem(images))))
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores

    def initialise(self, generator: torch.Generator) -> None:
        """Give every parameter and every buffer its initial value."""
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()  # ones and zeros, also in the running averages
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        nn.init.kaiming_normal_(self.head.weight, nonlinearity="linear", generator=generator)
        nn.init.zeros_(self.head.bias)
