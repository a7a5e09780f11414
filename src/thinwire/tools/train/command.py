"""What `thinwire train` runs. Not in the package itself: a model must not need the packages of the command line."""

from .config import Config


def run(options: Config) -> int:
    """Train; 0 if it was finished, 128 and the signal's number if it was told to stop."""
    from .launch import join, launch  # which loads torch, for which help and wrong options should not wait
    from .place import Place

    place = Place.of_torchrun()
    return launch(options) if place is None else join(options, place)
