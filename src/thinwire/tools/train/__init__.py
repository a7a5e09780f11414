"""`thinwire train`: train a model on several ranks with compressed exchange, and write a report.

command.py              the function that `thinwire train` calls
config.py, options.py   the options, and their values by recipe, by file, or by the run that is resumed
launch.py, rank.py      start of the ranks; work of one rank
fresh_store.py          a store for each start, also after a restart by torchrun
loop.py, learner.py     the training loop; a model with its optimizer and exchange
checkpoints.py          checkpoints that a killed run resumes from
metrics.py, view.py     metrics that are written; progress that is shown
data.py, images.py      the data sets: text, and images by idx.py and cifar.py
models.py               the models
"""

from pathlib import Path

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts Fashion-MNIST. Here, for modules that must not load torch or tyro."""
