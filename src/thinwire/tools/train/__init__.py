"""`thinwire train`: models trained between workers that send few bytes; from one command to a page to look at.

command.py              what `thinwire train` runs
config.py, recipes.py   the options, and named settings of them
launch.py, rank.py      who starts the workers; what each of them does
loop.py, learner.py     a training; a model with its optimizer and exchange
checkpoints.py          what a killed run goes on from
metrics.py, view.py     what is written, and what is shown
data, models/           what there is to train on, and to train
"""
