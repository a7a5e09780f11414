"""An extension of griffe, which reads docstrings for the reference: it makes Markdown of thinwire's docstrings."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Lists of names, doctests and indented code become Markdown; the rest of a docstring is Markdown already."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown.

    A paragraph of lines `name   what it is`, each with two spaces or more after the name, is a list; lines that
    are indented go on with the line before. A paragraph that begins with `>>>` is Python.
    """
    return "\n\n".join(_paragraph(text) for text in re.split(r"\n\s*\n", docstring.strip("\n")))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines[0].startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if not all(line.startswith(" ") or re.match(r"\S.*? {2,}\S", line) for line in lines) or lines[0].startswith(" "):
        return text
    items: list[str] = []
    for line in lines:
        if line.startswith(" "):
            items[-1] += " " + line.strip()
        else:
            name, what = re.split(r" {2,}", line, maxsplit=1)
            items.append(f"* `{name}`: {what}")
    return "\n".join(items)
