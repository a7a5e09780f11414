"""Options that the command line does not give: those of a recipe, of a file, or of the run that is resumed.

A file is JSON, or YAML where PyYAML is installed. A run's own config.json is such a file. It may leave options out.
A key or a value that does not fit is an error with the nearest one that does.
"""

import dataclasses
import difflib
import json
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from . import FASHION_FOLDER
from .config import CONFIG_FILE, Config, newest_run, option
from .folder import METRICS_FILE

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
        recipe="fashion-cnn", model="cnn:width=16,size=28", data="fashion-mnist", data_dir=FASHION_FOLDER, batch=64,
        steps=2000, optimizer="sgd",
        lr=0.03,  # as for torch.optim.SGD with momentum 0.9
        weight_decay=5e-4, eval_every=500, checkpoint_every=500,
    ),
    # A ResNet-18 for photographs of 32 x 32 pixels: 30 epochs on two ranks with accelerators.
    "cifar10-resnet18": Config(
        recipe="cifar10-resnet18", model="resnet18:width=64", data="cifar10", batch=128, steps=5860, optimizer="sgd",
        lr=0.1, weight_decay=5e-4, eval_every=500, checkpoint_every=500,
    ),
}  # fmt: skip
"""Options that a recipe leaves out have the default of `Config`."""
_YAML = (".yaml", ".yml")
_BOOL = re.compile(r"(?:true|false)$")
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?$", re.IGNORECASE)
_NAMES = [field.name for field in dataclasses.fields(Config)]
_MEANT = {name: name for name in _NAMES} | {"learning_rate": "lr", "world_size": "workers", "output_dir": "out"}
"""Names that are near to an option: its own, and what others call it."""


def defaults(arguments: Sequence[str]) -> Config:
    """Return the options of the file for --config, and where it has none, of the resumed run or of the recipe."""
    file = option(arguments, "config")
    given = {} if file is None else read_config(Path(file))
    name = option(arguments, "recipe") or given.get("recipe")
    if (option(arguments, "resume") or given.get("resume")) == "auto":
        out = option(arguments, "out") or given.get("out")
        folder = Path(out) if out else newest_run(name)
        if folder is not None and (folder / CONFIG_FILE).exists():
            return dataclasses.replace(load_config(folder), **{**given, "out": folder, "resume": "auto"})
    recipe = RECIPES[name if name in RECIPES else "digits-cnn"]  # tyro reports an unknown name
    return dataclasses.replace(recipe, **given)


def read_config(path: Path) -> dict[str, Any]:
    """Return the options that a file for `--config` gives; raise ValueError if it is not one.

    The config.json of a run starts another run: it gives neither its folder nor whether it was resumed.
    """
    try:
        given = _values(_parse(path))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read ({error.strerror}), expected a file of options") from None
    if path.name == CONFIG_FILE and (path.parent / METRICS_FILE).exists():
        given = {name: value for name, value in given.items() if name not in ("out", "resume")}
    return given


def load_config(folder: Path) -> Config:
    """Return the config of a run; raise ValueError if it is damaged or of another version."""
    path = folder / CONFIG_FILE
    try:
        given = _values(_parse(path))
        missing = [name for name in _NAMES if name not in given]
        if missing:
            raise ValueError(f"missing options: {', '.join(missing)}")
        return Config(**given)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the config of a run that this version can go on with: {error}") from None


def _parse(path: Path) -> object:
    text = path.read_text(encoding="utf-8")
    if path.suffix.lower() in _YAML:
        return _parse_yaml(text, path)
    if path.suffix.lower() != ".json":
        raise ValueError(f"{path.name} ends in {path.suffix or 'nothing'}, expected .json, .yaml or .yml")
    return json.loads(text, object_pairs_hook=_once)


def _parse_yaml(text: str, path: Path) -> object:
    """Parse YAML with the numbers and booleans of its version 1.2.

    By those of version 1.1, which are PyYAML's, `lr: 1e-3` would be text and `resume: no` a boolean.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError(f"{path.name} needs PyYAML: pip install 'thinwire[yaml]', or write it as JSON") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """The types of YAML that JSON has, too."""

        yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML has it
            first: [(tag, pattern) for tag, pattern in found if tag.rpartition(":")[2] in ("int", "null")]
            for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tf"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    Loader.add_constructor(
        "tag:yaml.org,2002:map",
        lambda loader, node: _once([
            (loader.construct_object(key), loader.construct_object(value, deep=True)) for key, value in node.value
        ]),
    )  # fmt: skip
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of the pairs; raise ValueError if a key is there twice."""
    made: dict[Any, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"{reprlib.repr(key)} is given twice")
        made[key] = value
    return made


def _values(given: object) -> dict[str, Any]:
    """Return the values of the options; raise ValueError if a key or a value does not fit."""
    if not isinstance(given, dict):
        raise ValueError(f"{type(given).__name__}, expected options with their values, such as steps and 100")
    return {name: _value(name, value) for name, value in given.items()}


def _value(name: object, value: object) -> Any:
    """Return the value of one option. In a file, a path is text and a tuple a list."""
    if not isinstance(name, str) or name not in _NAMES:
        nearest = difflib.get_close_matches(str(name).replace("-", "_"), _MEANT, 1, cutoff=0.0)
        raise ValueError(f"unknown option {reprlib.repr(name)}; did you mean {_MEANT[nearest[0]]}?")
    default = Config().record()[name]
    kinds = {float: (int, float), tuple: (list,), type(None): (str, type(None))}.get(type(default), (type(default),))
    if type(value) not in kinds:
        names = {str: "text", list: "a list of texts", bool: "true or false", type(None): "nothing"}
        expected = " or ".join(names.get(kind, kind.__name__) for kind in kinds)
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected {expected}")
    if isinstance(default, float):
        try:
            value = float(value)  # type: ignore[arg-type]
        except OverflowError:
            raise ValueError(f"{name} is a whole number of {len(str(value))} digits, expected a float") from None
    if isinstance(value, list) and not all(isinstance(part, str) for part in value):
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected a list of texts")
    hint = get_type_hints(Config)[name]
    choices = [choice for choice in get_args(hint) if isinstance(choice, str)]
    if isinstance(value, str) and choices and value not in choices:
        nearest = difflib.get_close_matches(value, choices, 1, cutoff=0.0)
        expected = f"{', '.join(choices)}; did you mean {nearest[0]}?"
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected one of {expected}")
    if isinstance(value, str) and (hint is Path or Path in get_args(hint)):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
