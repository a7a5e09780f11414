"""Imports point downwards only, so that every layer can be read, tested and used without those above it.

Imports by string are not seen: the commands in tools/cli.py, the kernels in kernels/__init__.py, and the public names.
"""

from pathlib import Path

import pytest

import thinwire
import thinwire.testing
from support.imports import imported, modules_in_cycles
from support.processes import run_python

ROOT = Path(thinwire.__file__).parent
LAYERS = [
    "__main__", "tools", "testing", "frameworks", "optim", "integrations", "sync", "collectives", "compressors",
    "kernels",
]  # fmt: skip
"""From the top down. A module may import its own room, and those below it."""
BELOW = {"collectives.transport": [], "collectives.algorithms": ["transport", "cost"]}
"""What the modules of a part of a room may import from the rest of that room."""


def part_of(name: str) -> str | None:
    """The room in "thinwire.collectives.cost.ring" (collectives) or "thinwire.TopK" (compressors); None outside."""
    if not name.startswith("thinwire."):
        return None
    part = name.split(".")[1]
    if part in thinwire._HOME:
        part = thinwire._HOME[part].split(".")[1]
    return None if part.startswith("__") else part


def test_imports_point_downwards() -> None:
    for path in ROOT.rglob("*.py"):
        own, *inner = path.relative_to(ROOT).with_suffix("").parts
        if own == "__init__":
            continue  # the public names, loaded on first use
        for name in imported(path, ROOT):
            part, where = part_of(name), f"{path.relative_to(ROOT)} imports {name}"
            # A room that has no place in LAYERS is an error, too.
            assert part in (None, own) or part in LAYERS[LAYERS.index(own) + 1 :], f"{where}, not from below {own}"
            # Its names are loaded on first use, from any layer: the line above would see none of that.
            assert name != "thinwire" or own == "tools", f"{where} as a whole"
            below = BELOW.get(f"{own}.{inner[0]}") if inner else None
            if below is not None and part == own:
                assert name.split(".")[2] in (inner[0], *below), where


def test_no_module_needs_itself() -> None:
    """Imports for types alone, and those inside of functions, count, too."""
    assert modules_in_cycles(ROOT) == []


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
    names = set(imported(ROOT / "compressors" / "base.py", ROOT))
    assert names >= {"thinwire.compressors.statistics.Statistics", "thinwire.kernels"}
    parts = [part_of(name) for name in ("thinwire.TopK", "thinwire.__version__", "torch.nn")]
    assert parts == ["compressors", None, None]


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
