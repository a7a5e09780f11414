"""Compares the weight of the project with budget.toml.

    PYTHONPATH=tests python -m support.budget

It prints a table, and ends with exit status 1 if something weighs more than it may. The path of a bucket is measured by
tests/project/test_rules.py, since it needs two ranks.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from support.imports import modules_in_cycles

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "src" / "thinwire"

Weights = dict[str, dict[str, int]]


def budget() -> Weights:
    """Return what the project may weigh."""
    limits: Weights = tomllib.loads((ROOT / "budget.toml").read_text())
    return limits


def lines(folder: Path) -> int:
    """Return the number of lines of Python in a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def words(pages: Iterable[Path]) -> int:
    """Return the number of words in these pages."""
    return sum(len(page.read_text().split()) for page in pages)


def cases() -> int:
    """Return how many tests `make test` runs. They are collected in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", "tests", "src"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"pytest cannot collect the tests:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return sum(int(count) for count in re.findall(r"^\S+\.py: (\d+)$", done.stdout, re.MULTILINE))


def arguments(file: Path, class_name: str) -> int:
    """Return the number of arguments of a class's constructor."""
    tree = ast.parse(file.read_text())
    (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    (init,) = (node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    every = [*init.args.posonlyargs, *init.args.args[1:], *init.args.kwonlyargs, init.args.vararg, init.args.kwarg]
    return sum(argument is not None for argument in every)


def measure() -> Weights:
    """Return what the project weighs now, in the form of budget.toml, without the path of a bucket."""
    rooms = {path.name: lines(path) for path in sorted(LIBRARY.iterdir()) if (path / "__init__.py").exists()}
    return {
        "src": {"all": lines(ROOT / "src"), **rooms},
        "tools": {part: lines(LIBRARY / "tools" / part) for part in ("train", "plan", "report")},
        "project": {
            "tests": lines(ROOT / "tests"),
            "cases": cases(),
            "benchmarks": lines(ROOT / "benchmarks"),
            "words": words([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]),
            "import_cycles": len(modules_in_cycles(LIBRARY)),
            "adamw_options": arguments(LIBRARY / "optim" / "adamw.py", "AdamW"),
        },
    }


def exceeded(weights: Weights, limits: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for everything that is heavier than its limit or has none, and for limits of what is not there."""
    found = []
    for part, measured in weights.items():
        for name, weight in measured.items():
            limit = limits.get(part, {}).get(name)
            if limit is None:
                found.append(f"[{part}] {name}: expected a limit in budget.toml, got none (it weighs {weight:,})")
            elif weight > limit:
                found.append(f"[{part}] {name}: expected at most {limit:,}, got {weight:,}")
    stale = [(part, name) for part, given in limits.items() for name in given if name not in weights.get(part, {})]
    return found + [f"[{part}] {name}: expected something to measure, got a limit alone" for part, name in stale]


def main() -> int:
    """Print what the project weighs beside its limits; return the exit status."""
    weights, limits = measure(), budget()
    del limits["bucket"]
    for part, measured in weights.items():
        for name, weight in measured.items():
            print(f"{part + '.' + name:24} {weight:>7,} of {limits.get(part, {}).get(name, 0):>7,}")
    errors = exceeded(weights, limits)
    for line in errors:
        print(f"over budget: {line}. Make room first, or raise it and say why in the commit.", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
