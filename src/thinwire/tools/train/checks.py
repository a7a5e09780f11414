"""Checks of a config before any process is started."""

import math

import thinwire
from thinwire.collectives.plan import max_bytes
from thinwire.sync.policy import AUTO, DEFAULT

from .config import Config
from .datasets import check_fit
from .metrics import chosen_sinks
from .models import model_config
from .place import pick_device

LARGEST_SEED = 1 << 62
LARGEST_WORLD = 64
"""Largest number of ranks that are started on one machine without torchrun."""


def check(config: Config) -> None:
    """Raise ValueError if a training with this config cannot run."""
    for name, least in {"steps": 1, "batch": 1, "workers": 1, "keep": 1, "log_every": 1}.items():
        _at_least(config, name, least)
    for name in ("warmup_steps", "checkpoint_every", "eval_every", "seed"):
        _at_least(config, name, 0)
    if config.seed > LARGEST_SEED:
        raise ValueError(f"--seed {config.seed}, expected at most 2**62")
    if config.workers > LARGEST_WORLD:
        raise ValueError(f"--workers {config.workers}, expected at most {LARGEST_WORLD} on one machine")
    if not 0 < config.lr < math.inf:
        raise ValueError(f"--lr {config.lr:g}, expected a number above 0")
    if not 0 <= config.weight_decay < math.inf:
        raise ValueError(f"--weight-decay {config.weight_decay:g}, expected 0 or more")
    sparse = config.compressor == DEFAULT or (
        config.compressor != AUTO and thinwire.compressor(config.compressor).sparse
    )
    if sparse and config.optimizer == "adamw" and config.warmup_steps < 1:
        raise ValueError(
            f"--warmup-steps 0 with {config.compressor}: AdamW's second moment begins with gradients as they are; give "
            "1 or more, such as 2"
        )
    max_bytes(None)  # raises ValueError if the environment variable is not valid
    check_fit(model_config(config.model), config.data)
    chosen_sinks(config.log_to)
    pick_device(config.device, 0)
    if config.out is not None and config.out.exists() and not config.out.is_dir():
        raise ValueError(f"--out {config.out} is a file, expected a folder or a new name")


def _at_least(config: Config, name: str, least: int) -> None:
    value = getattr(config, name)
    if value < least:
        raise ValueError(f"--{name.replace('_', '-')} {value}, expected {least} or more")
