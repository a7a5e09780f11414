"""Checks of a config before any process is started."""

import math

import thinwire
from thinwire.collectives.plan import max_bytes
from thinwire.sync.policy import AUTO, DEFAULT
from thinwire.tools.links import LARGEST_WORLD
from thinwire.tools.units import parse_rate

from .config import FILE_ONLY, Config
from .datasets import check_fit
from .device import pick_device
from .metrics import chosen_sinks
from .models import model_config

LARGEST_SEED = 1 << 62
LARGEST_BATCH = 1 << 20
LARGEST_STEPS = 1 << 40


def check(config: Config) -> None:
    """Raise ValueError if a training with this config cannot run."""
    for name, least in {"steps": 1, "batch": 1, "workers": 1, "keep": 1, "log_every": 1}.items():
        _at_least(config, name, least)
    for name in ("warmup_steps", "checkpoint_every", "eval_every", "seed"):
        _at_least(config, name, 0)
    if config.steps > LARGEST_STEPS:
        raise ValueError("--steps is too large, expected at most 2**40")
    if config.batch > LARGEST_BATCH:
        raise ValueError(f"--batch {config.batch}, expected at most {LARGEST_BATCH:,} samples per rank and step")
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
    if config.link is not None:
        parse_rate(config.link)
        if config.device not in ("auto", "cpu") or config.shard > 1:
            given = f"--shard {config.shard}" if config.shard > 1 else f"--device {config.device}"
            raise ValueError(f"--link with {given}, expected ranks on the CPU with DDP: leave one of them out")
        if config.download or "wandb" in config.log_to:
            raise ValueError("--link with --download or --log-to wandb: ranks behind links reach no other network")
    _check_shard(config)
    max_bytes(None)  # raises ValueError if the environment variable is not valid
    check_fit(model_config(config.model), config.data)
    chosen_sinks(config.log_to)
    pick_device(config.device, 0)
    if config.out is not None and config.out.exists() and not config.out.is_dir():
        raise ValueError(f"--out {config.out} is a file, expected a folder or a new name")


def _check_shard(config: Config) -> None:
    _at_least(config, "shard", 1)
    if config.shard == 1:
        return
    if not config.model.startswith("gpt"):
        raise ValueError(f"--shard {config.shard} with {config.model}, expected a gpt, such as --recipe text-gpt")
    if config.compressor not in (AUTO, DEFAULT):
        given = thinwire.compressor(config.compressor)
        if not given.sparse and not isinstance(given, thinwire.NoCompression):
            raise ValueError(f"--shard with {config.compressor}, expected a sparse compressor, default, auto or none")
    if config.device == "mps":
        raise ValueError("--shard with --device mps, expected cpu or cuda")


def check_world(config: Config, world_size: int) -> None:
    """Raise ValueError if the ranks cannot form replicas of `--shard` ranks."""
    if world_size % config.shard:
        raise ValueError(f"--shard {config.shard} with {world_size} ranks, expected a divisor of their number")


def _at_least(config: Config, name: str, least: int) -> None:
    value = getattr(config, name)
    if value < least:
        label = name if name in FILE_ONLY else f"--{name.replace('_', '-')}"
        raise ValueError(f"{label} {value}, expected {least} or more")
