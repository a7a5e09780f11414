"""Checks of a config before any process is started. What the library checks itself is not repeated."""

import math

import thinwire
from thinwire.collectives.plan import max_bytes
from thinwire.sync.policy import AUTO, DEFAULT
from thinwire.tools.links import LARGEST_WORLD

from .config import FILE_ONLY, Config
from .control import pick_device
from .images import check_fit
from .metrics import chosen_sinks
from .models import model_config

DENSE = "none"
_LEAST = {
    1: ("steps", "batch", "workers", "shard", "keep", "log_every"),
    0: ("warmup_steps", "local_steps", "checkpoint_every", "eval_every", "seed"),
}
_LARGEST = 1 << 40


def check(config: Config) -> None:
    """Raise ValueError if a training with this config cannot run."""
    for least, names in _LEAST.items():
        for name in names:
            value, most = getattr(config, name), LARGEST_WORLD if name == "workers" else _LARGEST
            if not least <= value <= most:
                label = name if name in FILE_ONLY else f"--{name.replace('_', '-')}"
                raise ValueError(f"{label} {value}, expected {least} to {most:,}")
    max_bytes(None)
    check_fit(model_config(config.model), config.data)
    chosen_sinks(config.log_to)
    pick_device(config.device, 0)
    compressor, local, shard = config.compressor, config.local_steps, config.shard > 1
    sends = sends_updates(compressor)
    fits_shard = sends or compressor == DENSE
    needs_warmup = config.optimizer == "adamw" and sends and compressor != AUTO and not local
    for is_wrong, message in (
        (not 0 < config.lr < math.inf, f"--lr {config.lr:g}, expected a number above 0"),
        (not 0 <= config.weight_decay < math.inf, f"weight_decay {config.weight_decay:g}, expected 0 or more"),
        (needs_warmup and config.warmup_steps < 1, f"--warmup-steps 0 with {compressor} and adamw, expected 1 or more"),
        (shard and not config.model.startswith("gpt"), f"--shard with {config.model}, expected a gpt"),
        (shard and not fits_shard, f"--shard with {compressor}, expected a sparse compressor, default, auto or none"),
        (local and shard, "--local-steps with --shard: each rank needs the whole model; leave one of them out"),
        (local and compressor == AUTO, "--local-steps with --compressor auto: give a compressor, or default"),
        (
            config.link and (config.device == "cuda" or shard or config.download or "wandb" in config.log_to),
            "--link with --device cuda, --shard, --download or --log-to wandb: ranks behind links are on the CPU, with "
            "DDP, and reach no other network",
        ),
    ):
        if is_wrong:
            raise ValueError(message)


def sends_updates(compressor: str) -> bool:
    """Return whether thinwire's optimizer compresses its update; else torch's has compressed gradients."""
    return compressor in (AUTO, DEFAULT) or thinwire.compressor(compressor).sparse
