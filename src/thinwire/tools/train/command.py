"""The function that `thinwire train` calls.

It is not in `__init__.py`, because a model must not need the packages of the command line.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from thinwire.tools import fork_server
from thinwire.tools.links.network import prepare

from .config import Config
from .link import check_link
from .place import Place
from .recipes import defaults


@dataclass(frozen=True)
class Options(Config):
    """Options of `thinwire train`, with the help text of `Config`."""

    __doc__ = Config.__doc__

    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Options as JSON or YAML, such as the config.json of a run; those on the command line override them."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        """Return the options that hold unless the command line gives others."""
        return cls(**vars(defaults(arguments)))


def run(options: Options) -> int:
    """Train and return the exit code: 0 if training finished, 128 plus the number of the signal that stopped it.

    After an error it is 1 or 2.
    """
    given = {name: value for name, value in vars(options).items() if name != "config"}
    place, config = Place.of_torchrun(), Config(**given)
    why_relay = None
    if config.link is not None:
        if place is not None:
            raise ValueError(
                "--link, or link in the config of the run, under torchrun: expected ranks that thinwire train starts "
                "itself, without torchrun"
            )
        check_link(config)
        config = replace(config, device="cpu" if config.device == "auto" else config.device)
    if place is None:
        if config.link is not None:
            why_relay = prepare()
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch warns that addresses have no host names
        fork_server.start()  # before torch is imported here
    from .launch import join, launch  # imports torch, which --help and wrong options do not need

    return launch(config, why_relay) if place is None else join(config, place)
