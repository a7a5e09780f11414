"""`thinwire train`: train a model on several ranks with compressed exchange, and write a report.

command, config, checks   options and what cannot be; launch, place, control: how ranks start, meet and talk
rank, loop, learner       a rank and the folder of a run; the training loop; a model with its optimizer and exchange
checkpoints, metrics      what is written and shown; data, images, image_files, models: what is trained
"""

from pathlib import Path

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts Fashion-MNIST. Here, for modules that must not load torch or tyro."""
