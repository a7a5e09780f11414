"""Checks of a config before any process is started."""

import math
import reprlib

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
LOCAL_DEFAULT = "topk:ratio=1/64,bits=2"
"""What `default` is with --local-steps, for any number of ranks."""
_MANY = 1 << 40
_RANGES = {
    "steps": (1, _MANY), "batch": (1, 1 << 20), "workers": (1, LARGEST_WORLD), "shard": (1, _MANY), "keep": (1, _MANY),
    "log_every": (1, _MANY), "warmup_steps": (0, _MANY), "local_steps": (0, _MANY), "checkpoint_every": (0, _MANY),
    "eval_every": (0, _MANY), "seed": (0, 1 << 62),
}  # fmt: skip


def check(config: Config) -> None:
    """Raise ValueError if a training with this config cannot run."""
    for name, (least, most) in _RANGES.items():
        value = getattr(config, name)
        if not least <= value <= most:
            expected = f"{least} or more" if value < least else f"at most {most:,}"
            raise ValueError(f"{_label(name)} {reprlib.repr(value)}, expected {expected}")
    if not 0 < config.lr < math.inf:
        raise ValueError(f"--lr {config.lr:g}, expected a number above 0")
    if not 0 <= config.weight_decay < math.inf:
        raise ValueError(f"weight_decay {config.weight_decay:g}, expected 0 or more")
    needs_warmup = sends_updates(config.compressor) and config.compressor != AUTO and not config.local_steps
    if needs_warmup and config.optimizer == "adamw" and config.warmup_steps < 1:
        raise ValueError(
            f"--warmup-steps 0 with {config.compressor}: AdamW's second moment begins with gradients as they are; give "
            "1 or more, such as 2"
        )
    if config.shard > 1 and not config.model.startswith("gpt"):
        raise ValueError(f"--shard {config.shard} with {config.model}, expected a gpt, such as --recipe text-gpt")
    if config.shard > 1 and config.compressor != DENSE and not sends_updates(config.compressor):
        raise ValueError(f"--shard with {config.compressor}, expected a sparse compressor, default, auto or none")
    if config.local_steps and config.shard > 1:
        raise ValueError(
            f"--local-steps {config.local_steps} with --shard {config.shard}: each rank needs the whole model to take "
            "steps alone; leave one of them out"
        )
    if config.local_steps and config.compressor == AUTO:
        raise ValueError(
            f"--local-steps {config.local_steps} with --compressor auto, which chooses by the time of single steps: "
            "give a compressor, or default"
        )
    max_bytes(None)  # raises ValueError if the environment variable is not valid
    check_fit(model_config(config.model), config.data)
    chosen_sinks(config.log_to)
    pick_device(config.device, 0)
    if config.out is not None and config.out.exists() and not config.out.is_dir():
        raise ValueError(f"--out {config.out} is a file, expected a folder or a new name")


def sends_updates(compressor: str) -> bool:
    """Return whether thinwire's optimizer compresses its update; else gradients are compressed, for torch's optimizer.

    With --shard, the optimizer is thinwire's in any case.
    """
    return compressor in (AUTO, DEFAULT) or thinwire.compressor(compressor).sparse


def local_compressor(config: Config) -> str:
    """Return the compressor of the differences that ranks exchange with --local-steps."""
    return LOCAL_DEFAULT if config.compressor == DEFAULT else config.compressor


def _label(name: str) -> str:
    return name if name in FILE_ONLY else f"--{name.replace('_', '-')}"
