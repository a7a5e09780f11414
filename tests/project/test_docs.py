"""The examples of docs/wire-format.md are made again, byte by byte; tests that docs and planted mistakes name exist.

A block ```hex holds bytes in hex, with `# comments`; the ```python block before it leaves the same in `frame`.
"""

import re
import runpy

import pytest

from support.pages import ROOT, blocks
from thinwire import CompressedTensor, kernels

PAGE = ROOT / "docs" / "wire-format.md"
TESTS = re.compile(r"`(tests/[\w/]+\.py)`")


def examples() -> list[tuple[str, bytes]]:
    """(Python that makes a frame, the bytes that the page shows)."""
    found, code = [], ""
    for block in blocks():
        if block.page == PAGE.name and block.language == "python":
            code = block.text
        elif block.page == PAGE.name and block.language == "hex":
            found.append((code, bytes.fromhex(" ".join(line.partition("#")[0] for line in block.text.splitlines()))))
    return found


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_worked_examples(backend: str) -> None:
    shown = examples()
    assert shown, f"{PAGE.name} shows no frame in hex"
    for code, expected in shown:
        names: dict[str, bytes] = {}
        with kernels.force(backend):
            exec(code, names)
        assert names["frame"].hex(" ") == expected.hex(" ")
        assert CompressedTensor.from_bytes(expected).to_bytes() == expected


def test_tests_that_are_named_are_there() -> None:
    named = {name: page.name for page in PAGE.parent.glob("*.md") for name in TESTS.findall(page.read_text())}
    assert len(named) > 15
    assert not {name: page for name, page in named.items() if not (ROOT / name).is_file()}


def test_planted_mistakes_fit_the_library_and_name_tests_that_are_there() -> None:
    """`python benchmarks/mutants.py` plants them, which takes too long for every run of the tests."""
    mutants = runpy.run_path(str(ROOT / "benchmarks" / "mutants.py"))["read_mutants"]()
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        compile(mutant.mutated(), mutant.file, "exec")  # raises if it does not fit, and says which it is
        for test in mutant.tests:
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text()
            assert f"def {name.partition('[')[0]}(" in text, f"{mutant.number} {mutant.file}: {test} does not exist"
