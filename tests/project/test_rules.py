"""Rules of CONTRIBUTING.md that no linter knows: rooms and imports, words and docstrings, the path of a bucket.

Imports by string are not seen: the commands in tools/cli.py, the kernels in kernels/__init__.py, and the public names.
"""

import ast
import re
from pathlib import Path

import pytest

import thinwire
import thinwire.testing
from support import budget
from support.bucket_path import traced_step
from support.imports import imported, modules_in_cycles
from support.processes import run_python
from thinwire.testing import RankPool

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "src" / "thinwire"
LAYERS = [
    "__main__", "tools", "testing", "frameworks", "optim", "integrations", "sync", "collectives", "compressors",
    "kernels",
]  # fmt: skip
"""From the top down. A module may import its own room, and those below it."""
BELOW = {"collectives.transport": [], "collectives.algorithms": ["transport", "cost", "handle"]}
"""What the modules of a part of a room may import from the rest of that room."""
WORDS = re.compile(r"\b(owed?|told|parcel|settle[sd]?|judged?)\b|goes dense|x fewer", re.IGNORECASE)
FRAGMENT = re.compile(r"(Of|By|As|From|For|With|Without|In|At|On|To|And|Or|Where|Who|Whose|Which|What|How|Whether)\b")
"""First words of a docstring that has no verb."""


def part_of(name: str) -> str | None:
    """The room in "thinwire.collectives.cost.ring" (collectives) or "thinwire.TopK" (compressors); None outside."""
    if not name.startswith("thinwire."):
        return None
    part = name.split(".")[1]
    if part in thinwire._HOME:
        part = thinwire._HOME[part].split(".")[1]
    return None if part.startswith("__") else part


def test_imports_point_downwards() -> None:
    for path in LIBRARY.rglob("*.py"):
        own, *inner = path.relative_to(LIBRARY).with_suffix("").parts
        if own == "__init__":
            continue  # the public names, loaded on first use
        for name in imported(path, LIBRARY):
            part, where = part_of(name), f"{path.relative_to(LIBRARY)} imports {name}"
            # A room that has no place in LAYERS is an error, too.
            assert part in (None, own) or part in LAYERS[LAYERS.index(own) + 1 :], f"{where}, not from below {own}"
            # Its names are loaded on first use, from any layer: the line above would see none of that.
            assert name != "thinwire" or own == "tools", f"{where} as a whole"
            below = BELOW.get(f"{own}.{inner[0]}") if inner else None
            if below is not None and part == own:
                assert name.split(".")[2] in (inner[0], *below), where


def test_imports_are_seen() -> None:
    """Relative, absolute and inside a function: otherwise the test above would pass on anything."""
    names = set(imported(LIBRARY / "compressors" / "base.py", LIBRARY))
    assert names >= {"thinwire.compressors.statistics.Statistics", "thinwire.kernels"}
    parts = [part_of(name) for name in ("thinwire.TopK", "thinwire.__version__", "torch.nn")]
    assert parts == ["compressors", None, None]


def test_no_module_needs_itself(tmp_path: Path) -> None:
    """Imports for types alone, and those inside of functions, count, too."""
    assert modules_in_cycles(LIBRARY) == []
    for name, text in {
        "a": "from . import b",
        "b": "def late():\n    from .a import x",
        "c": "from . import a",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert modules_in_cycles(tmp_path) == [f"{tmp_path.name}.{name}" for name in "abc"]
    (tmp_path / "b.py").write_text("import os")
    assert modules_in_cycles(tmp_path) == []


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    for module in (thinwire, thinwire.testing):
        for name in module.__all__:
            assert getattr(module, name) is not None, name
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'gzip'"):
            module.gzip  # noqa: B018
    assert set(thinwire.__all__) <= set(dir(thinwire))


def test_library_and_models_need_no_package_of_the_commands_and_the_server_of_ranks_no_torch() -> None:
    """Nor do the digits, nor one of the frameworks: what only commands use is imported where it is used."""
    code = """
        import sys
        import thinwire.testing.server
        assert 'torch' not in sys.modules
        for name in ('rich', 'tyro', 'sklearn', 'pooch', 'matplotlib', 'requests', *sys.argv[1:]):
            sys.modules[name] = None
        from thinwire.testing import RankPool, inject, run_threads
        assert not {'pytest', 'thinwire.tools'} & sys.modules.keys()
        for name in thinwire.__all__:
            getattr(thinwire, name)
        from thinwire.tools.train.models import model_config
        from thinwire.tools.train.images import Images
        model_config('gpt:layers=1,width=32').build(0)
        print(Images('digits').length)
    """
    frameworks = ("lightning", "accelerate", "transformers")
    assert run_python(code, *frameworks, time_limit=200, quiet=True) == "1437"


def test_words_of_another_field_are_not_used() -> None:
    """docs/glossary.md has the words to use."""
    for text in ("what is owed", "It was told once", "a bucket that goes dense", "83x fewer bytes"):
        assert WORDS.search(text), text
    assert not WORDS.search("slowed, allowed, followed, showed; a toldmap; fewer; settings; judgement")
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for folder in ("src", "tests", "docs", "examples")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".md") and path.name not in ("log.md", Path(__file__).name)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(line)
    ]
    assert not lines, "\n".join(lines)


def test_docstrings_of_functions_are_sentences() -> None:
    fragments = [
        f"{path.name}:{node.lineno} {node.name}: {ast.get_docstring(node)}"
        for path in LIBRARY.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and FRAGMENT.match(ast.get_docstring(node) or "")
    ]
    assert not fragments, "\n".join(fragments)


def test_bucket_passes_no_more_files_and_classes_than_budgeted(ranks: RankPool) -> None:
    """What needs no ranks is checked by `make lint`."""
    limits = budget.budget()["bucket"]
    path = ranks.run(traced_step, 2)[0]
    assert {"integrations/ddp.py", "optim/adamw.py"} <= set(path.files), "the trace does not see the step"
    assert len(path.files) <= limits["files"], path.files
    assert len(path.classes) <= limits["classes"], path.classes


def test_what_exceeds_its_limit_is_named_with_both_numbers() -> None:
    weights = {"src": {"sync": 31, "optim": 30}, "bucket": {"files": 3}}
    found = budget.exceeded(weights, {"src": {"sync": 30, "optim": 30, "gone": 1}})
    assert found[0] == "[src] sync: expected at most 30, got 31"
    assert ["[bucket] files" in found[1], "[src] gone" in found[2], len(found)] == [True, True, 3]
