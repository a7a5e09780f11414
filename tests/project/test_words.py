"""Words that code, tests and docs do not use, because the field has others, and docstrings that are sentences.

docs/glossary.md has the words to use.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("src", "tests", "docs", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md") and path.name not in ("log.md", Path(__file__).name)
)
WORDS = re.compile(r"\b(owed?|told|parcel|settle[sd]?|judged?)\b|goes dense|x fewer", re.IGNORECASE)
FRAGMENT = re.compile(r"(Of|By|As|From|For|With|Without|In|At|On|To|And|Or|Where|Who|Whose|Which|What|How|Whether)\b")
"""First words of a docstring that has no verb."""


def functions(path: Path) -> list[tuple[str, str]]:
    """The name and the docstring of each function that has one."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(f"{path.name}:{node.lineno} {node.name}", ast.get_docstring(node) or "") for node in found]


def test_words_of_another_field_are_not_used() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(line)
    ]
    assert not lines, "\n".join(lines)


def test_docstrings_of_functions_are_sentences() -> None:
    library = [path for path in FILES if path.is_relative_to(ROOT / "src") and path.suffix == ".py"]
    fragments = [f"{name}: {doc[:80]}" for path in library for name, doc in functions(path) if FRAGMENT.match(doc)]
    assert not fragments, "\n".join(fragments)


def test_words_are_found_and_others_with_the_same_letters_are_not() -> None:
    for text in ("what is owed", "It was told once", "a bucket that goes dense", "83x fewer bytes"):
        assert WORDS.search(text), text
    assert not WORDS.search("slowed, allowed, followed, showed; a toldmap; fewer; settings; judgement")
