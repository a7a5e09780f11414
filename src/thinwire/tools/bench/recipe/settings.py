"""Checks the options before anything runs. Raises `ValueError` for options that cannot be run."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from thinwire.tools.train.data import Data, Digits
from thinwire.tools.train.datasets import check_fit, load_data
from thinwire.tools.train.models import CNNConfig, GPTConfig, ModelConfig, ResNet18Config, model_config

from .exchanges import ring_bytes
from .options import Options
from .recipes import RECIPES, Chosen, parse

LARGEST_WORLD = 64
LEARNING_RATES: dict[type[ModelConfig], tuple[float, float]] = {
    GPTConfig: (1e-3, 0.2),
    CNNConfig: (1e-3, 0.02),
    ResNet18Config: (1e-3, 0.1),
}
"""Learning rates of AdamW and SGD, by model.

At 2e-3, the losses of dense runs of the default size differ by 0.2 between seeds, at 1e-3 by 0.01.
"""


@dataclass(frozen=True)
class Case:
    """One training: a recipe and a seed."""

    recipe: Chosen
    seed: int

    @property
    def title(self) -> str:
        """Recipe and seed, as text."""
        return f"{self.recipe.text}, seed {self.seed}"


@dataclass(frozen=True)
class Settings:
    """The checked options."""

    cases: tuple[Case, ...]
    config: ModelConfig
    data: str
    data_dir: Path
    workers: int
    batch: int
    steps: int
    warmup_steps: int
    lr: dict[str, float]
    """Learning rate of each family of optimizers."""
    device: str
    simulate: bool
    bf16: bool

    def build(self, seed: int) -> nn.Module:
        """Build the model with the initial weights of a seed."""
        return self.config.build(seed)

    def load_data(self) -> Data:
        """Load the data onto the device. Digits get noise, because trainings would otherwise end too much alike."""
        if self.data == "digits":
            return Digits(noise=0.5, device=self.device)
        context = self.config.context if isinstance(self.config, GPTConfig) else None
        return load_data(self.data, self.data_dir, context, device=self.device)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.build(0).parameters())

    def dense_bytes(self, steps: int) -> float:
        """Return the bytes that each rank sends in `steps` dense ring all-reduces of float32 gradients."""
        return ring_bytes(4 * self.parameters, self.workers) * steps

    def record(self) -> dict[str, object]:
        """Return the settings for the conditions of a record."""
        return {
            "model": self.config.name,
            "config": asdict(self.config),
            "parameters": self.parameters,
            "data": self.data_dir.name if self.data == "text" and self.data_dir.is_file() else self.data,
            "workers": self.workers,
            "worker_threads": None if self.simulate else 1,
            "batch": self.batch,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "lr": self.lr,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "simulate": self.simulate,
            "bf16": self.bf16,
        }


def settings(options: Options) -> Settings:
    """Return the checked options. Raises ValueError for options that cannot be run."""
    texts = tuple(RECIPES) if options.recipes == ("all",) else options.recipes
    if not texts:
        raise ValueError("--recipes without a recipe, expected all, or one or more names")
    chosen = [parse(text) for text in texts]
    if not 2 <= options.workers <= LARGEST_WORLD:
        raise ValueError(f"--workers {options.workers}, expected 2 to {LARGEST_WORLD}")
    for name in ("batch", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}, expected 1 or more")
    if not options.seeds:
        raise ValueError("--seeds without a seed, expected one or more whole numbers")
    warmup = max(1, min(2, options.steps // 2)) if options.warmup_steps is None else options.warmup_steps
    if not 0 <= warmup < options.steps:
        raise ValueError(f"--warmup-steps {warmup}, expected 0 or more, and fewer than the {options.steps} steps")
    config = model_config(options.model)
    data = options.data or ("text" if isinstance(config, GPTConfig) else "digits")
    check_fit(config, data)
    lr = options.lr or LEARNING_RATES[type(config)]
    if not all(0 < rate < float("inf") for rate in lr):
        raise ValueError(f"--lr {lr[0]:g} {lr[1]:g}, expected two numbers above 0")
    if options.bf16 and not options.simulate:
        raise ValueError("--bf16 without --simulate, which alone computes so; add --simulate, or leave --bf16 out")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device here; use --device cpu")
    return Settings(
        tuple(Case(one, seed) for one in chosen for seed in options.seeds),
        config,
        data,
        options.data_dir,
        options.workers,
        options.batch,
        options.steps,
        warmup,
        dict(zip(("adamw", "sgd"), lr, strict=True)),
        options.device,
        options.simulate,
        options.bf16,
    )
