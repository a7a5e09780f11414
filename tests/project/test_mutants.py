"""The list of planted mistakes is current: each fits the library as it is, and names tests that exist.

`python benchmarks/mutants.py` plants them, which takes too long for every run of the tests.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "mutants.py"))
MUTANTS = SCRIPT["read_mutants"]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.number} {mutant.file}")
def test_it_can_be_planted(mutant: Any) -> None:
    compile(mutant.mutated(), mutant.file, "exec")
    for test in mutant.tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert f"def {name.partition('[')[0]}(" in text, f"{test} does not exist"


def test_each_is_another() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
