"""What `thinwire train` runs. Not in the package itself: a model must not need the packages of the command line."""

from collections.abc import Sequence
from dataclasses import dataclass

from .config import Config
from .recipes import defaults


@dataclass(frozen=True)
class Options(Config):
    __doc__ = Config.__doc__

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        """Return what holds where the command line is silent."""
        return cls(**vars(defaults(arguments)))


def run(options: Options) -> int:
    """Train; 0 if it was finished, 128 and the signal's number if it was told to stop."""
    from .launch import join, launch  # which loads torch, for which help and wrong options should not wait
    from .place import Place

    place, config = Place.of_torchrun(), Config(**vars(options))
    return launch(config) if place is None else join(config, place)
