"""Recipes: named functions that return a config. What they leave out is as in `Config`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from .config import CONFIG_FILE, Config, load_config, newest_run, option


def digits_cnn() -> Config:
    """Handwritten digits of 8 x 8 pixels, which come with scikit-learn: seconds on two cores."""
    return Config()


def text_gpt() -> Config:
    """A GPT that reads the Python sources of this machine, byte by byte: minutes on two cores."""
    return Config(
        recipe="text-gpt", model="gpt:layers=4,width=128,heads=4,context=64", data="text", batch=8, steps=600,
        eval_every=200, checkpoint_every=200,
    )  # fmt: skip


def mnist_cnn() -> Config:
    """Handwritten digits of 28 x 28 pixels, from a local folder or fetched."""
    return Config(
        recipe="mnist-cnn", model="cnn:width=32,size=28", data="mnist", batch=64, steps=1000, eval_every=250,
        checkpoint_every=250,
    )  # fmt: skip


def fashion_cnn() -> Config:
    """Clothes of 28 x 28 pixels, of Debian's package or from a local folder: minutes on two cores."""
    return Config(
        recipe="fashion-cnn", model="cnn:width=16,size=28", data="fashion-mnist", data_dir=Path("data/fashion-mnist"),
        batch=64, steps=2000, optimizer="sgd",
        lr=0.03,  # as of torch.optim.SGD with momentum 0.9
        weight_decay=5e-4, eval_every=500, checkpoint_every=500,
    )  # fmt: skip


def cifar10_resnet18() -> Config:
    """Photographs of 32 x 32 pixels, from a local folder or fetched: wants an accelerator. 30 epochs of two."""
    return Config(
        recipe="cifar10-resnet18", model="resnet18:width=64", data="cifar10", batch=128, steps=5860, optimizer="sgd",
        lr=0.1, weight_decay=5e-4, eval_every=500, checkpoint_every=500,
    )  # fmt: skip


RECIPES: dict[str | None, Callable[[], Config]] = {
    "digits-cnn": digits_cnn,
    "text-gpt": text_gpt,
    "mnist-cnn": mnist_cnn,
    "fashion-cnn": fashion_cnn,
    "cifar10-resnet18": cifar10_resnet18,
}


def defaults(arguments: Sequence[str]) -> Config:
    """Return what holds where the command line is silent: the run that is resumed, or the recipe that is named."""
    name = option(arguments, "recipe")
    if option(arguments, "resume") == "auto":
        out = option(arguments, "out")
        folder = Path(out) if out else newest_run(name)
        if folder is not None and (folder / CONFIG_FILE).exists():
            return replace(load_config(folder), out=folder, resume="auto")
    return RECIPES[name if name in RECIPES else "digits-cnn"]()  # tyro will say what names there are
