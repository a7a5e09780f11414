"""`thinwire train`: models trained between workers that send few bytes; from one command to a page to look at.

config.py, recipes.py   the options, and named settings of them
launch.py, rank.py      who starts the workers; what each of them does
loop.py, learner.py     a training; a model with its optimizer and exchange
checkpoints.py          what a killed run goes on from
metrics.py, view.py     what is written, and what is shown
data, models/           what there is to train on, and to train
"""

from .config import Config


def run(options: Config) -> int:
    """Train; 0 if it was finished, 128 and the signal's number if it was told to stop."""
    from .launch import join, launch  # which loads torch, for which help and wrong options should not wait
    from .place import Place

    place = Place.of_torchrun()
    return launch(options) if place is None else join(options, place)
