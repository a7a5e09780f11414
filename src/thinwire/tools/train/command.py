"""The function that `thinwire train` calls.

It is not in `__init__.py`, because a model must not need the packages of the command line.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from thinwire.testing import server
from thinwire.tools.place import Place

from .config import Config, defaults


@dataclass(frozen=True)
class Options(Config):
    """Options of `thinwire train`, with the help text of `Config`."""

    __doc__ = Config.__doc__

    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Options as JSON or TOML, such as the config.json of a run; those on the command line override them."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        return cls(**vars(defaults(arguments)))


def run(options: Options) -> int:
    """Train and return the exit code: 0 if finished, 128 plus the number of a signal, and 1 or 2 after an error."""
    config = Config(**{name: value for name, value in vars(options).items() if name != "config"})
    place = Place.of_torchrun()
    if config.link is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch warns that addresses have no host names
    if place is None:
        server.start()  # before torch is imported here
    from .launch import join, launch  # imports torch, which --help and wrong options do not need

    return launch(config) if place is None else join(config, place)
