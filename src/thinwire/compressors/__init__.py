"""Compressors. A new compressor needs one file in this folder and one import line below."""

from .base import Compressor
from .compressed import CompressedTensor
from .none import NoCompression
from .quantize import Quantize
from .randomk import RandomK
from .spec import format_spec, parse_spec, register_compressor, registered
from .topk import TopK

__all__ = [
    "CompressedTensor",
    "Compressor",
    "NoCompression",
    "Quantize",
    "RandomK",
    "TopK",
    "compressor",
    "format_spec",
    "register_compressor",
    "registered",
]


def compressor(spec: str | Compressor, name: str = "compressor") -> Compressor:
    """Return the compressor for a spec string. A Compressor is returned unchanged.

    `name` is the name of the argument in the error message.

    >>> import thinwire
    >>> thinwire.compressor("topk:ratio=1/64,bits=2")
    TopK(ratio=Fraction(1, 64), bits=2, chunk=4096)
    """
    if not isinstance(spec, str | Compressor):
        raise ValueError(f"{name} {spec!r}, expected a Compressor or a spec such as 'topk:ratio=1/64,bits=2'")
    return parse_spec(spec) if isinstance(spec, str) else spec
