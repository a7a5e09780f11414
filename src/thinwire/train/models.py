"""Two small models: a GPT that reads bytes, and a CNN for small images; each named by a spec, as compressors are.

Weights depend on the seed alone, not on torch's global generator: ranks and threads that build the same model have the
same bits, and nobody else's random numbers change.
"""

import math
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
"""Bytes."""


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 64
    """Bytes that the model sees at once."""
    bias: int = 0
    """1: layers and norms have biases, as GPT-2's; later models do without."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}, expected 1 or more")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} with {self.heads} heads, expected a multiple of the heads")

    def build(self, seed: int) -> "GPT":
        with torch.device("meta"):  # layers would fill themselves from the global generator
            model = GPT(self)
        return _filled(model, seed)


@dataclass(frozen=True)
class CNNConfig:
    width: int = 32
    """Channels of the first layer; the next ones have 2 and 4 times as many."""
    size: int = 8
    """Of the images, in pixels each way."""
    classes: int = 10

    def __post_init__(self) -> None:
        if self.width < 1 or self.classes < 2:
            raise ValueError(f"width {self.width} and {self.classes} classes, expected 1 and 2 or more")
        if self.size < 4 or self.size % 4:
            raise ValueError(f"images of {self.size} pixels, expected a multiple of 4")

    def build(self, seed: int) -> "SimpleCNN":
        with torch.device("meta"):
            model = SimpleCNN(self)
        return _filled(model, seed)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and around a skip."""

    def __init__(self, config: GPTConfig) -> None:
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
    """Pre-norm transformer over bytes; weights as in nanoGPT: normal of 0.02, less on the way into the skips."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=bool(config.bias))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte at each position; tokens are (batch, length) of int64."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def initialise(self, generator: torch.Generator) -> None:
        into_skips = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                std = into_skips if name.endswith(("project.weight", "contract.weight")) else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)


class SimpleCNN(nn.Module):
    """Three convolutions with group norms, halved twice, and two linear layers."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        width, rest = config.width, config.size // 4
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.norm2, self.norm3 = nn.GroupNorm(1, 2 * width), nn.GroupNorm(1, 4 * width)
        self.hidden = nn.Linear(4 * width * rest * rest, 4 * width)
        self.head = nn.Linear(4 * width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes; images are (batch, 1, size, size)."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        scores: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return scores

    def initialise(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)


CONFIGS: dict[str, type[GPTConfig] | type[CNNConfig]] = {"gpt": GPTConfig, "cnn": CNNConfig}


def model_config(spec: str) -> GPTConfig | CNNConfig:
    """name:key=value,...; what is not given has its default.

    >>> model_config("gpt:layers=4,width=256")
    GPTConfig(layers=4, width=256, heads=4, context=64, bias=0)
    """
    name, _, rest = spec.partition(":")
    if name not in CONFIGS:
        raise ValueError(f"model {name!r} in {spec!r} is unknown, expected one of {', '.join(CONFIGS)}")
    known = [field.name for field in fields(CONFIGS[name])]
    options = {}
    for part in rest.split(",") if rest else []:
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not value.isdecimal():
            raise ValueError(
                f"{part!r} in {spec!r}, expected key=value with a whole number and one of {', '.join(known)}"
            )
        options[key] = int(value)
    return CONFIGS[name](**options)


Model = TypeVar("Model", GPT, SimpleCNN)


def _filled(model: Model, seed: int) -> Model:
    """With memory, which it has none of yet, and weights."""
    model.to_empty(device="cpu")
    model.initialise(torch.Generator().manual_seed(seed))
    return model
