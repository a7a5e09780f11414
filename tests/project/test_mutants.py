"""The list of planted mistakes is current: each fits the library as it is, and names tests that exist.

`python benchmarks/mutants.py` plants them, which takes too long for every run of the tests.
"""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "mutants.py"))
MUTANTS = SCRIPT["read_mutants"]()


def test_each_is_another_and_can_be_planted() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        compile(mutant.mutated(), mutant.file, "exec")  # raises if it does not fit, and says which it is
        for test in mutant.tests:
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text()
            assert f"def {name.partition('[')[0]}(" in text, f"{mutant.number} {mutant.file}: {test} does not exist"
