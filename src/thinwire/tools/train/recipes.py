"""Recipes: named configs. Options that they leave out have the default of `Config`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .config import CONFIG_FILE, Config, newest_run, option
from .config_file import load_config, read_config

RECIPES: dict[str | None, Config] = {
    # A CNN for handwritten digits of 8 x 8 pixels: seconds on two cores.
    "digits-cnn": Config(),
    # A byte-level GPT for the Python sources of this machine: minutes on two cores.
    "text-gpt": Config(
        recipe="text-gpt", model="gpt:layers=4,width=128,heads=4,context=64", data="text", batch=8, steps=600,
        eval_every=200, checkpoint_every=200,
    ),
    # A CNN for handwritten digits of 28 x 28 pixels, from a local folder or downloaded.
    "mnist-cnn": Config(
        recipe="mnist-cnn", model="cnn:width=32,size=28", data="mnist", batch=64, steps=1000, eval_every=250,
        checkpoint_every=250,
    ),
    # A CNN for clothes of 28 x 28 pixels, by Debian or from a folder: minutes on two cores.
    "fashion-cnn": Config(
        recipe="fashion-cnn", model="cnn:width=16,size=28", data="fashion-mnist", data_dir=Path("data/fashion-mnist"),
        batch=64, steps=2000, optimizer="sgd",
        lr=0.03,  # as for torch.optim.SGD with momentum 0.9
        weight_decay=5e-4, eval_every=500, checkpoint_every=500,
    ),
    # A ResNet-18 for photographs of 32 x 32 pixels: 30 epochs on two ranks with accelerators.
    "cifar10-resnet18": Config(
        recipe="cifar10-resnet18", model="resnet18:width=64", data="cifar10", batch=128, steps=5860, optimizer="sgd",
        lr=0.1, weight_decay=5e-4, eval_every=500, checkpoint_every=500,
    ),
}  # fmt: skip


def defaults(arguments: Sequence[str]) -> Config:
    """Return the options of the file for --config, and where it has none, of the resumed run or of the recipe."""
    file = option(arguments, "config")
    given = {} if file is None else read_config(Path(file))
    name = option(arguments, "recipe") or given.get("recipe")
    if (option(arguments, "resume") or given.get("resume")) == "auto":
        out = option(arguments, "out") or given.get("out")
        folder = Path(out) if out else newest_run(name)
        if folder is not None and (folder / CONFIG_FILE).exists():
            return replace(load_config(folder), **{**given, "out": folder, "resume": "auto"})
    recipe = RECIPES[name if name in RECIPES else "digits-cnn"]  # tyro reports an unknown name
    return replace(recipe, **given)
