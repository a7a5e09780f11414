"""Tests of code that uses thinwire: several ranks in one test, and faults at a rank and a step.

run_threads   ranks as threads of this process. Starts at once; for what ranks compute.
RankPool      ranks as processes with a gloo group. For DDP, for torch.distributed, and for ranks that die.
inject        lets faults happen: RaiseError, Kill, Stop, NotFinite.

thinwire's own tests use this module. It does not need pytest. docs/collectives.md has examples.
"""

import ast
import importlib
import pkgutil

# As in `thinwire`: the server of processes starts before torch is loaded.
_HOME = {
    alias.name: f".{statement.module}"
    for statement in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
