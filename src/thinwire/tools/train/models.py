"""Small models: a byte-level GPT, a CNN and a ResNet for small images; each is named by a spec, like compressors.

Weights depend only on the seed, not on torch's global generator: so ranks and threads have the same bits.
"""

import math
import re
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Config:
    name: ClassVar[str]
    model: ClassVar[type[nn.Module]]

    def build(self, seed: int) -> nn.Module:
        """Return a new model with weights that depend only on the seed."""
        with torch.device("meta"):  # without memory, or its layers would draw from the global generator
            model = self.model(self)
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:  # the weight of a norm
                nn.init.ones_(parameter)
            else:
                self._fill(name, parameter, generator)
        return model

    def _fill(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Draw the initial value of a weight of a layer: for images as He et al. (2015), for the GPT as nanoGPT."""
        is_head = name == "head.weight" and self.name == "resnet18"
        mode: Literal["fan_in", "fan_out"] = "fan_out" if self.name == "resnet18" and not is_head else "fan_in"
        nn.init.kaiming_normal_(weight, 0, mode, "linear" if is_head else "relu", generator)


class Block(nn.Module):
    """Attention and a feed-forward network, each after a layer norm and with a skip connection."""

    def __init__(self, config: "GPTConfig") -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        bias = bool(config.bias)
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.attention, self.project = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.expand, self.contract = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.attention(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        thought: Tensor = self.contract(F.gelu(self.expand(self.norm2(x))))
        return x + thought


class GPT(nn.Module):
    """Pre-norm transformer over bytes."""

    def __init__(self, config: "GPTConfig") -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=bool(config.bias))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


@dataclass(frozen=True)
class GPTConfig(_Config):
    """Options of the GPT."""

    name, model, inputs = "gpt", GPT, ()

    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 64
    """Number of bytes that the model sees at once."""
    bias: int = 0
    """1 if layers and norms have biases, as in GPT-2; 0 if not, as in later models."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} with {self.heads} heads, expected a multiple of the heads")

    def _fill(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        is_added = name.endswith(("project.weight", "contract.weight"))  # to a skip connection
        std = 0.02 / math.sqrt(2 * self.layers) if is_added else 0.02
        nn.init.normal_(weight, std=std, generator=generator)


class CNN(nn.Module):
    """Three convolutions, the last two with a group norm and a max pool of 2 x 2, and two linear layers."""

    def __init__(self, config: "CNNConfig") -> None:
        super().__init__()
        width, rest = config.width, config.size // 4
        self.conv1 = nn.Conv2d(config.channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.norm2, self.norm3 = nn.GroupNorm(1, 2 * width), nn.GroupNorm(1, 4 * width)
        self.hidden = nn.Linear(4 * width * rest * rest, 4 * width)
        self.head = nn.Linear(4 * width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        scores: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return scores


@dataclass(frozen=True)
class CNNConfig(_Config):
    """Options of the CNN."""

    name, model = "cnn", CNN

    width: int = 32
    """Channels of the first layer; the next ones have 2 and 4 times as many."""
    size: int = 8
    """Height and width of the images in pixels."""
    classes: int = 10
    channels: int = 1
    """Channels of the images: 1 if they are grey, 3 if they have colours."""

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.channels, self.size, self.size


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
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.skip(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2015) for images of 32 x 32: it begins with a convolution of 3 x 3 and without a pool."""

    def __init__(self, config: "ResNet18Config") -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, config.width, 3, padding=1, bias=False), nn.BatchNorm2d(config.width)
        widths = [config.width << stage for stage in range(4)]
        self.stages = nn.Sequential()
        for before, width in zip([config.width, *widths], widths, strict=False):
            self.stages.append(Residual(before, width, stride=1 if width == config.width else 2))
            self.stages.append(Residual(width, width, stride=1))
        self.head = nn.Linear(widths[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(F.relu(self.norm(self.stem(images))))
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


@dataclass(frozen=True)
class ResNet18Config(_Config):
    """Options of the ResNet-18."""

    name, model, inputs = "resnet18", ResNet18, (3, 32, 32)

    width: int = 64
    """Channels of the first stage; the next ones have 2, 4 and 8 times as many."""
    classes: int = 10


ModelConfig = GPTConfig | CNNConfig | ResNet18Config
CONFIGS: dict[str, type[ModelConfig]] = {config.name: config for config in (GPTConfig, CNNConfig, ResNet18Config)}


def model_config(spec: str) -> ModelConfig:
    """Return the config of a model from its spec, name:key=value,...; a key that is not given has its default."""
    name, _, rest = spec.partition(":")
    if name not in CONFIGS:
        raise ValueError(f"model {name!r} in {spec!r} is unknown, expected one of {', '.join(CONFIGS)}")
    known = [field.name for field in fields(CONFIGS[name])]
    options = {}
    for part in rest.split(",") if rest else []:
        match = re.fullmatch(rf" *({'|'.join(known)}) *= *(0|[1-9][0-9]{{0,5}}) *", part)
        if match is None or (match[2] == "0" and match[1] != "bias"):
            expected = f"key=value with one of {', '.join(known)}, and a whole number from 1 to 999,999"
            raise ValueError(f"{part!r:.80} in {spec!r:.80}, expected {expected}")
        options[match[1]] = int(match[2])
    return CONFIGS[name](**options)
