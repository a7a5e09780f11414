"""Which modules of thinwire import which others, read from their sources.

Imports for types alone and those inside of functions count. Imports by string are not seen: the commands in
tools/cli.py, the kernels in kernels/__init__.py, and the public names.
"""

import ast
from collections.abc import Iterator
from pathlib import Path


def imported(path: Path, root: Path) -> Iterator[str]:
    """Yield the full names of everything that a file below the package `root` imports."""
    package = [root.name, *path.relative_to(root).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def modules_in_cycles(root: Path) -> list[str]:
    """Return the modules of the package `root` that need themselves, or one that does; its `__init__` is left out."""
    modules = {_module_of(path, root): path for path in sorted(root.rglob("*.py")) if path != root / "__init__.py"}
    needs: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {name if name in modules else name.rpartition(".")[0] for name in imported(path, root)}
        needs[module] = (names & modules.keys()) - {module}
    while ready := {module for module, others in needs.items() if not others}:
        needs = {module: others - ready for module, others in needs.items() if module not in ready}
    return sorted(needs)


def _module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
