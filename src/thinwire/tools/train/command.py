"""The function that `thinwire train` calls.

It is not in `__init__.py`, because a model must not need the packages of the command line.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from thinwire.testing import server
from thinwire.tools.units import parse_link

from .config import Config, defaults
from .place import Place


@dataclass(frozen=True)
class Options(Config):
    """Options of `thinwire train`, with the help text of `Config`."""

    __doc__ = Config.__doc__

    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Options as JSON or TOML, such as the config.json of a run; those on the command line override them."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        """Return the options that hold unless the command line gives others."""
        return cls(**vars(defaults(arguments)))


def run(options: Options) -> int:
    """Train and return the exit code: 0 if finished, 128 plus the number of a signal, and 1 or 2 after an error."""
    given = {name: value for name, value in vars(options).items() if name != "config"}
    place, config = Place.of_torchrun(), Config(**given)
    if config.link is not None:
        _check_link(config, place)
        config = replace(config, device="cpu")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch warns that addresses have no host names
    if place is None:
        server.start()  # before torch is imported here
    from .launch import join, launch  # imports torch, which --help and wrong options do not need

    return launch(config) if place is None else join(config, place)


def _check_link(config: Config, place: Place | None) -> None:
    """Raise ValueError if ranks cannot be behind links of the rate that is given, before anything is started."""
    if place is not None:
        raise ValueError("--link, or link in the config of the run, under torchrun: expected thinwire train by itself")
    assert config.link is not None
    parse_link(config.link)
    if config.device == "cuda" or config.shard > 1:
        raise ValueError(
            "--link with --device cuda or --shard, expected ranks on the CPU with DDP: leave one of them out"
        )
    if config.download or "wandb" in config.log_to:
        raise ValueError("--link with --download or --log-to wandb: ranks behind links reach no other network")
