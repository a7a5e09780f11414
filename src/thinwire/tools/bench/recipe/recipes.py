"""The recipes: names, and how each makes an optimizer and an exchange out of a model.

dense       torch's optimizer on averaged gradients
fp16 hook   the same with gradients in 16 bits, and powersgd: between processes by torch's communication hooks, between
            threads by the same rules
textbook    the gradient is compressed with error feedback, then torch's optimizer steps: the way that papers begin with
thinwire    thinwire's optimizer, which compresses its update; "8-bit": textbook with a compressor that is safe there

All that compress have the same warm-up: textbook and thinwire in 8 bits, PowerSGD dense. All of a family have the same
learning rate, and SGD has momentum 0.9. A recipe that would do better with others, dense ones too, is asked for with
them: "adamw dense;lr=2e-3;betas=0.8,0.999".
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import thinwire

from . import exchanges
from .exchanges import Exchange, Setup

TOPK = "topk:ratio=1/64,bits=2"
WARMUP = "quantize:bits=8"

Optimizer = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    family: str
    """adamw or sgd: which learning rate, and which dense run it is compared with."""
    build: Callable[[Setup], Exchange]
    optimizer: Callable[[], Optimizer]
    """The class that takes a recipe's options; asked for when it is needed."""
    compresses: bool = False
    """Whether it takes a compressor, too."""
    options: dict[str, object] = field(default_factory=dict)
    """Of the optimizer, where a training usually gives others than its defaults."""


@dataclass(frozen=True)
class Chosen:
    """A recipe as it was asked for."""

    text: str
    name: str
    options: dict[str, object] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.name]


def parse(text: str) -> Chosen:
    """A name, and options behind it: name;key=value;key=value.

    >>> parse("adamw dense;lr=2e-3;betas=0.8,0.99").options
    {'lr': 0.002, 'betas': (0.8, 0.99)}
    """
    name, *given = (part.strip() for part in text.split(";"))
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown, expected one of: {', '.join(RECIPES)}")
    recipe, options = RECIPES[name], {}
    known = set(inspect.signature(recipe.optimizer()).parameters) - {"params", "group", "self"}
    known |= {"compressor", "algorithm"} if recipe.compresses else set()
    for part in given:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            raise ValueError(
                f"option {part!r} of recipe {name!r}, expected key=value with one of: {', '.join(sorted(known))}"
            )
        options[key] = _value(value)
    return Chosen(text, name, options)


def _value(text: str) -> object:
    """A number, a tuple, True, None; else the text itself, as a compressor's spec is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _adamw() -> Optimizer:
    return torch.optim.AdamW


def _sgd() -> Optimizer:
    return torch.optim.SGD


def _thinwire_adamw() -> Optimizer:
    return thinwire.AdamW


def _thinwire_sgd() -> Optimizer:
    return thinwire.SGD


_MOMENTUM: dict[str, object] = {"momentum": 0.9}


def _textbook(setup: Setup) -> Exchange:
    return exchanges.synchronized(setup, TOPK, [(setup.warmup_steps, WARMUP)] if setup.warmup_steps else [])


def _powersgd(rank: int) -> Callable[[Setup], Exchange]:
    return lambda setup: exchanges.powersgd(setup, rank)


RECIPES = {
    "adamw dense": Recipe("adamw", exchanges.dense, _adamw),
    "adamw fp16 hook": Recipe("adamw", exchanges.fp16, _adamw),
    "adamw powersgd rank 1": Recipe("adamw", _powersgd(1), _adamw),
    "adamw powersgd rank 4": Recipe("adamw", _powersgd(4), _adamw),
    "adamw textbook topk": Recipe("adamw", _textbook, _adamw, compresses=True),
    "adamw thinwire 8-bit": Recipe(
        "adamw", lambda setup: exchanges.synchronized(setup, WARMUP, []), _adamw, compresses=True
    ),
    "adamw thinwire": Recipe("adamw", exchanges.in_optimizer, _thinwire_adamw),
    "sgd dense": Recipe("sgd", exchanges.dense, _sgd, options=_MOMENTUM),
    "sgd textbook topk": Recipe("sgd", _textbook, _sgd, compresses=True, options=_MOMENTUM),
    "sgd thinwire": Recipe("sgd", exchanges.in_optimizer, _thinwire_sgd, options=_MOMENTUM),
}
