"""The recipes: their names, and how each builds an optimizer and an exchange from a model.

dense       torch's optimizer on averaged gradients
fp16 hook   dense with gradients in 16 bits
powersgd    dense with gradients approximated by PowerSGD
textbook    error feedback on the gradient, then a step of torch's optimizer: the method that papers start from
thinwire    thinwire's optimizer, which compresses its update; "8-bit": textbook with an 8-bit compressor, which is safe
            there

fp16 and powersgd use torch's communication hooks between processes, and the same rules between threads.

Textbook and thinwire have a warm-up in 8 bits. The warm-up of PowerSGD has as many steps, at least 2, and is dense. All
recipes of a family have the same learning rate, and SGD has momentum 0.9. For a recipe that does better with other
options, dense ones too, write them behind its name: "adamw dense;lr=2e-3;betas=0.8,0.999".
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
    """A method to train: an optimizer and a way to exchange."""

    family: str
    """adamw or sgd. It selects the learning rate and the dense run to compare with."""
    build: Callable[[Setup], Exchange]
    optimizer: Callable[[], Optimizer]
    """Returns the optimizer class, which takes the options of the recipe."""
    compresses: bool = False
    """Whether the recipe also takes the options `compressor` and `algorithm`."""
    options: dict[str, object] = field(default_factory=dict)
    """Options of the optimizer that usually differ from its defaults in training."""


@dataclass(frozen=True)
class Chosen:
    """A recipe with the options that the user gave."""

    text: str
    name: str
    options: dict[str, object] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe of this name."""
        return RECIPES[self.name]


def parse(text: str) -> Chosen:
    """Parse a recipe name and its options: name;key=value;key=value.

    Raises ValueError for an unknown name or option.

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
    """Return the Python literal in a text (a number, a tuple, True, None), or else the text itself, such as a spec."""
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
