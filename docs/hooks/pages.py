"""A hook of MkDocs: pages of the site that are made from files outside of docs/, and links to such files.

Links in Markdown are relative to the file, as code hosts read them: `../examples/ddp.py`, `docs/training.md`. Here each
is pointed at the page that its file has become, or at a copy of the file, so that the site is complete in itself.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples": "examples.md",
}
"""Files and folders of the repository that become pages."""
LINK = re.compile(r'(\]\(|\b(?:src|href|srcset)=")([^)\s"#:]+)(?=[)#"\s])')
ITEM = re.compile(r"[*-] |\d+\. ")
ROOMS = {
    "optim": "Optimizers",
    "integrations": "DDP and FSDP",
    "sync": "Policies, plain loops and checkpoints",
    "compressors": "Compressors",
    "collectives": "The compressed all-reduce",
}
"""The rooms of the library whose names are public, with their headings in the reference."""
WITHOUT_A_SHORT_NAME = {"collectives": ["collectives.Handle", "collectives.Report", "collectives.LocalGroup"]}
"""What public functions return or take, and `import thinwire` does not name."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and a copy of every other file that a page links to."""
    for source, page in PAGES.items():
        text = _examples() if source == "examples" else (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference.md", content=_reference()))
    script = Path(__file__).with_name("iframe-worker.js")
    files.append(File.generated(config, f"assets/{script.name}", content=script.read_text()))
    for page in [file for file in files if file.src_uri.endswith(".md")]:
        for _, link in LINK.findall(page.content_string):
            copy = _target(link, page.src_uri)
            if copy.startswith("files/") and files.get_file_from_path(copy) is None:
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / copy.removeprefix("files/"))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages and files of the site, and let lists begin as they do on code hosts."""
    source = page.file.src_uri
    return _separate_lists(LINK.sub(lambda match: match[1] + _target(match[2], source), markdown))


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Add a link to a section, which `nav` of mkdocs.yml cannot have: it is what many come for."""
    page = files.src_uris["training.md"].page
    assert "\n## My script breaks\n" in files.src_uris["training.md"].content_string
    siblings = page.parent.children
    siblings.insert(siblings.index(page) + 1, Link("My script breaks?", "training.html#my-script-breaks"))
    return nav


def _target(link: str, page: str) -> str:
    """Return a link of a page as the site has it. One that leads to no file stays as it is, and MkDocs warns of it."""
    origin = next((source for source, made in PAGES.items() if made == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" if (ROOT / path).is_file() else link


def _separate_lists(markdown: str) -> str:
    """Return Markdown with an empty line before each list that follows a paragraph: Python's Markdown needs it."""
    lines: list[str] = []
    in_code = in_paragraph = False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            in_code, in_paragraph = not in_code, False
        elif not in_code and ITEM.match(line):
            lines += [""] if in_paragraph else []
            in_paragraph = False
        elif not line.strip():
            in_paragraph = False
        elif not lines or not lines[-1].strip() or lines[-1].startswith("#"):
            in_paragraph = not line.startswith("#")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _examples() -> str:
    """Return a page with the programs of examples/."""
    text = "# Programs to copy\n\nEach is in the folder `examples/`, and runs as it is.\n"
    for path in sorted((ROOT / "examples").glob("*.py")):
        text += f"\n## {path.name}\n\n```python\n{path.read_text()}```\n"
    return text


def _reference() -> str:
    """Return a page with every public name, which mkdocstrings fills in from the docstrings."""
    text = "# Reference\n\nEverything that is public, from the docstrings.\n"
    public = _exported("src/thinwire/__init__.pyi")
    for room, heading in ROOMS.items():
        names = [name for name, module in public.items() if module.partition(".")[0] == room]
        names += WITHOUT_A_SHORT_NAME.get(room, [])
        text += f"\n## {heading}\n" + "".join(_entry(name, inherited=room == "optim") for name in names)
    text += "\n## Kernels\n" + _entry("kernels")
    text += "\n## Tests of your own code\n"
    text += "".join(_entry(f"testing.{name}") for name in _exported("src/thinwire/testing/__init__.pyi"))
    for framework in ("lightning", "transformers"):
        text += f"\n## {framework.capitalize()}\n" + _entry(f"frameworks.{framework}")
    return text


def _exported(path: str) -> dict[str, str]:
    """Return the names that a file imports for others, with the module of each."""
    return {
        alias.name: statement.module
        for statement in ast.parse((ROOT / path).read_text()).body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in sorted(statement.names, key=lambda alias: alias.name.lower())
    }


def _entry(name: str, inherited: bool = False) -> str:
    return f"\n::: thinwire.{name}\n    options: {{inherited_members: {str(inherited).lower()}}}\n"
