"""What the pages for readers contain: README.md, CONTRIBUTING.md, SECURITY.md, CHANGELOG.md and docs/*.md."""

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A block of code: its page, the line at which it begins, its language ("" if there is none), and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """The blocks of code of all pages."""
    return [
        Block(page.name, text.count("\n", 0, found.start()) + 1, found[2].strip(), textwrap.dedent(found[3]))
        for page in PAGES
        for text in [page.read_text()]
        for found in FENCE.finditer(text)
    ]


def inline_code() -> list[tuple[str, str]]:
    """(page, code) of all code within lines of text."""
    return [(page.name, code) for page in PAGES for code in INLINE.findall(FENCE.sub("", page.read_text()))]


def python_of(block: Block) -> str | None:
    """The Python of a block, None if it is something else. Of a diff it is what the new lines make."""
    if block.language == "diff":
        lines = [line for line in block.text.splitlines() if not line.startswith("-")]
        return textwrap.dedent("\n".join(line[1:] for line in lines))
    if block.language == "python":
        return block.text
    return block.text if not block.language and _parses(block.text) else None


def _parses(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except SyntaxError:
        return False
