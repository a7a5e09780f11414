"""`thinwire train`: train a model on several ranks with compressed exchange, and write a report.

command.py              the function that `thinwire train` calls
config.py, checks.py    the options, their values by recipe, file, or the run that is resumed; what cannot be
launch.py, rank.py      start of the ranks; work of one rank, and the folder of a run
place.py, control.py    the place of a rank; how ranks meet and talk
loop.py, learner.py     the training loop; a model with its optimizer and exchange
checkpoints.py          checkpoints that a killed run resumes from
metrics.py, view.py     metrics that are written; progress that is shown
data.py, images.py      the data sets: text, and images by image_files.py and download.py
models.py               the models
"""

from pathlib import Path

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts Fashion-MNIST. Here, for modules that must not load torch or tyro."""
