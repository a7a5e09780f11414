"""Load the model to measure: a model of thinwire train by its spec, or the user's own model by file and function."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.tools.train.models import VOCABULARY, GPTConfig, ModelConfig, model_config

from .alone import Loss, Subject

BATCH = 32
"""Samples per rank and step for models of thinwire train; the same as its default."""


def subject_of(text: str, device: torch.device) -> Subject:
    """Return a function that builds the model and its loss; raise ValueError if `text` names no model."""
    path, _, function = text.rpartition(":")
    if path.endswith(".py"):
        return _checked(_load(Path(path), function, text), text, device)
    config = model_config(text)
    return lambda: (config.build(0).to(device), _loss(config, device))


def _loss(config: ModelConfig, device: torch.device) -> Loss:
    if isinstance(config, GPTConfig):
        inputs = torch.randint(VOCABULARY, (BATCH, config.context), device=device)
        classes, shape = VOCABULARY, inputs.shape
    else:
        inputs = torch.randn(BATCH, *config.inputs, device=device)
        classes, shape = config.classes, inputs.shape[:1]
    targets = torch.randint(classes, shape, device=device)

    def loss(module: nn.Module) -> Tensor:
        return F.cross_entropy(module(inputs).flatten(0, -2), targets.flatten())

    return loss


def _load(path: Path, function: str, text: str) -> Callable[[], Any]:
    if not path.is_file():
        raise ValueError(f"--model {text}: there is no file {path}, expected FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"--model {text}: {path} has no function {function!r}, expected FILE.py:FUNCTION")
    made: Callable[[], Any] = found
    return made


def _checked(make: Callable[[], Any], text: str, device: torch.device) -> Subject:
    def subject() -> tuple[nn.Module, Loss]:
        made = make()
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module) or not callable(made[1]):
            raise ValueError(
                f"--model {text} returned {type(made).__name__}, expected (module, loss), where loss(module) is a "
                "tensor to call backward() on"
            )
        return made[0].to(device), made[1]

    return subject
