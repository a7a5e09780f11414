"""thinwire: train PyTorch models over slow networks, with less than a hundredth of the bytes of a dense all-reduce.

>>> import torch, thinwire
>>> grad, residual = torch.randn(1_000_000), torch.zeros(1_000_000)
>>> ct = thinwire.compressor("topk:ratio=1/64,bits=2").compress(grad, residual)
>>> round(4 * grad.numel() / ct.nbytes)
195
"""

import ast
import importlib
import pkgutil

__version__ = "0.1.0"

# The public names stand in `__init__.pyi`. They are loaded on first use: `thinwire --help` must not wait for torch.
_HOME = {
    alias.name: "." + (statement.module or alias.name)
    for statement in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name], __name__)
    return module if name == "kernels" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
