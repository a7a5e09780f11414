"""The options, checked, and what follows from them: `ValueError` for what cannot be run, before anything runs."""

from dataclasses import asdict, dataclass

import torch
from torch import nn

from thinwire.train.data import Data, Digits, Text
from thinwire.train.datasets import check_fit
from thinwire.train.models import CNNConfig, GPTConfig, ModelConfig, model_config

from . import Options
from .exchanges import ring_bytes
from .recipes import RECIPES, Chosen, parse

LARGEST_WORLD = 64
LEARNING_RATES: dict[type[ModelConfig], tuple[float, float]] = {GPTConfig: (1e-3, 0.2), CNNConfig: (1e-3, 0.02)}
"""Of AdamW and SGD. At 2e-3 dense runs of the default size differ by 0.2 between seeds, at 1e-3 by 0.01."""


@dataclass(frozen=True)
class Case:
    """One training."""

    recipe: Chosen
    seed: int

    @property
    def title(self) -> str:
        return f"{self.recipe.text}, seed {self.seed}"


@dataclass(frozen=True)
class Settings:
    cases: tuple[Case, ...]
    left_out: tuple[str, ...]
    """Recipes that a simulation cannot run."""
    config: ModelConfig
    workers: int
    batch: int
    steps: int
    warmup_steps: int
    lr: dict[str, float]
    """By family of optimizers."""
    device: str
    simulate: bool
    bf16: bool

    def build(self, seed: int) -> nn.Module:
        return self.config.build(seed)

    def data(self) -> Data:
        return Text(self.config.context) if isinstance(self.config, GPTConfig) else Digits(noise=0.5)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.build(0).parameters())

    def dense_bytes(self, steps: int) -> float:
        """What each rank sends in a dense ring all-reduce of float32 gradients."""
        return ring_bytes(4 * self.parameters, self.workers) * steps

    def record(self) -> dict[str, object]:
        """For the conditions of a record."""
        return {
            "model": self.config.name,
            "config": asdict(self.config),
            "parameters": self.parameters,
            "workers": self.workers,
            "worker_threads": None if self.simulate else 1,
            "batch": self.batch,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "lr": self.lr,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "simulate": self.simulate,
            "bf16": self.bf16,
            "left_out": list(self.left_out),
        }


def settings(options: Options) -> Settings:
    texts = tuple(RECIPES) if options.recipes == ("all",) else options.recipes
    if not texts:
        raise ValueError("--recipes without a recipe, expected all, or one or more names")
    chosen = [parse(text) for text in texts]
    left_out = tuple(one.text for one in chosen if options.simulate and one.recipe.needs_processes)
    if len(left_out) == len(chosen):
        raise ValueError(f"--simulate with {', '.join(left_out)}, which need processes: leave --simulate out")
    if not 2 <= options.workers <= LARGEST_WORLD:
        raise ValueError(f"--workers {options.workers}, expected 2 to {LARGEST_WORLD}")
    for name in ("batch", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}, expected 1 or more")
    if not options.seeds:
        raise ValueError("--seeds without a seed, expected one or more whole numbers")
    warmup = max(1, min(4, options.steps // 2)) if options.warmup_steps is None else options.warmup_steps
    if not 0 <= warmup < options.steps:
        raise ValueError(f"--warmup-steps {warmup}, expected 0 or more, and fewer than the {options.steps} steps")
    config = model_config(options.model)
    check_fit(config, "text" if isinstance(config, GPTConfig) else "digits")
    lr = options.lr or LEARNING_RATES[type(config)]
    if not all(0 < rate < float("inf") for rate in lr):
        raise ValueError(f"--lr {lr[0]:g} {lr[1]:g}, expected two numbers above 0")
    if options.bf16 and not options.simulate:
        raise ValueError("--bf16 without --simulate, which alone computes so; add --simulate, or leave --bf16 out")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device here; use --device cpu")
    return Settings(
        tuple(Case(one, seed) for one in chosen if one.text not in left_out for seed in options.seeds),
        left_out,
        config,
        options.workers,
        options.batch,
        options.steps,
        warmup,
        dict(zip(("adamw", "sgd"), lr, strict=True)),
        options.device,
        options.simulate,
        options.bf16,
    )
