"""Imports point downwards only, so that every layer can be read, tested and used without those above it.

Imports by string are not seen: the commands in tools/cli.py, the kernels in kernels/__init__.py, and the public names.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire
import thinwire.testing
from support.processes import run_python

ROOT = Path(thinwire.__file__).parent
LAYERS = [
    "__main__",
    "tools",
    "testing",
    "frameworks",
    "optim",
    "integrations",
    "sync",
    "collectives",
    "compressors",
    "kernels",
]
"""From the top down. A module may import its own room, and those below it."""
BELOW = {"collectives.transport": [], "collectives.algorithms": ["transport", "cost", "handle"]}
"""What the modules of a part of a room may import from the rest of that room."""

FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The full names of everything in thinwire that a file imports: at its top, inside its functions, or for types."""
    package = ["thinwire", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str | None:
    """The room in "thinwire.collectives.cost.ring" (collectives) or "thinwire.TopK" (compressors); None outside."""
    if not name.startswith("thinwire."):
        return None
    part = name.split(".")[1]
    if part in thinwire._HOME:
        part = thinwire._HOME[part].split(".")[1]
    return None if part.startswith("__") else part


def layer_of(part: str) -> int:
    assert part in LAYERS, f"thinwire.{part} has no place in LAYERS of {__file__}: give it one"
    return LAYERS.index(part)


def test_imports_point_downwards() -> None:
    for path in FILES:
        relative = path.relative_to(ROOT)
        own = relative.parts[0].removesuffix(".py")
        if own == "__init__":
            continue  # the public names, loaded on first use
        for name in imported(path):
            part = part_of(name)
            where = f"{relative} imports {name}"
            assert part in (None, own) or layer_of(part) > layer_of(own), f"{where}, which does not stand below {own}"
            # Its names are loaded on first use, from any layer: the line above would see none of that.
            assert name != "thinwire" or own == "tools", f"{where} as a whole"


def test_imports_within_a_room_point_downwards() -> None:
    for part, below in BELOW.items():
        room, own = part.split(".")
        for path in (ROOT / room / own).glob("*.py"):
            for name in imported(path):
                if name.startswith(f"thinwire.{room}.") and name.split(".")[2] != own:
                    assert name.split(".")[2] in below, f"{path.relative_to(ROOT)} imports {name}"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_needs_itself() -> None:
    """Imports for types alone, and those inside of functions, count, too."""
    modules = {module_of(path): path for path in FILES if path != ROOT / "__init__.py"}
    needs: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {name if name in modules else name.rpartition(".")[0] for name in imported(path)}
        needs[module] = (names & modules.keys()) - {module}
    while True:
        ready = {module for module, others in needs.items() if not others}
        if not ready:
            break
        needs = {module: others - ready for module, others in needs.items() if module not in ready}
    assert not needs, "modules that need each other, or one of those that do"


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    for module in (thinwire, thinwire.testing):
        for name in module.__all__:
            assert getattr(module, name) is not None, name
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'gzip'"):
            module.gzip  # noqa: B018
    assert set(thinwire.__all__) <= set(dir(thinwire))


def test_testing_loads_neither_pytest_nor_the_tools_and_the_server_of_ranks_no_torch() -> None:
    code = """
        import sys, thinwire.testing.server
        print('torch' in sys.modules)
        from thinwire.testing import RankPool, inject, run_threads
        print([name for name in ('pytest', 'thinwire.tools') if name in sys.modules])
    """
    assert run_python(code).split("\n") == ["False", "[]"]


def test_the_layer_test_sees_what_it_should() -> None:
    """Relative, absolute and inside a function: otherwise the test above would pass on anything."""
    names = set(imported(ROOT / "compressors" / "base.py"))
    assert "thinwire.compressors.statistics.Statistics" in names
    assert "thinwire.kernels" in names
    assert part_of("thinwire.TopK") == "compressors"
    assert part_of("thinwire.__version__") is None
    assert part_of("torch.nn") is None
    assert importlib.import_module("thinwire.compressors.frame")


def test_the_library_and_the_models_need_no_package_of_the_commands() -> None:
    """Nor of the frameworks; nor do the digits: what only commands use is imported where it is used."""
    script = (
        "import sys\n"
        "for name in ('rich', 'tyro', 'sklearn', 'pooch', 'matplotlib', 'requests', *sys.argv[1:]):\n"
        "    sys.modules[name] = None\n"
        "import thinwire\n"
        "for name in thinwire.__all__:\n"
        "    getattr(thinwire, name)\n"
        "from thinwire.tools.train.models import model_config\n"
        "from thinwire.tools.train.images import Images\n"
        "model_config('gpt:layers=1,width=32').build(0)\n"
        "print(Images('digits').length)\n"
    )
    frameworks = ("lightning", "accelerate", "transformers")
    assert run_python(script, *frameworks, time_limit=200, quiet=True) == "1437"
