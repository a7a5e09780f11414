"""The check of `--link`. This module does not import torch: a wrong link is refused before anything is started."""

from thinwire.tools.units import parse_link

from .config import Config


def check_link(config: Config) -> None:
    """Raise ValueError if ranks of this config cannot be behind links of the rate that is given."""
    if config.link is None:
        return
    parse_link(config.link)
    if config.device not in ("auto", "cpu") or config.shard > 1:
        given = f"--shard {config.shard}" if config.shard > 1 else f"--device {config.device}"
        raise ValueError(f"--link with {given}, expected ranks on the CPU with DDP: leave one of them out")
    if config.download or "wandb" in config.log_to:
        raise ValueError("--link with --download or --log-to wandb: ranks behind links reach no other network")
