"""Compressors. A new compressor needs one file in this folder and one import line below."""

from typing import cast

from . import spec as _spec
from .base import CompressedTensor as CompressedTensor
from .base import Compressor as Compressor
from .none import NoCompression as NoCompression
from .quantize import Quantize as Quantize
from .randomk import RandomK as RandomK
from .spec import format_spec as format_spec
from .spec import register_compressor as register_compressor
from .topk import TopK as TopK


def compressor(spec: str | Compressor, name: str = "compressor") -> Compressor:
    """Return the compressor for a spec string. A Compressor is returned unchanged.

    `name` is the name of the argument in the error message.

    >>> import thinwire
    >>> thinwire.compressor("topk:ratio=1/64,bits=2")
    TopK(ratio=Fraction(1, 64), bits=2, chunk=4096)
    """
    if not isinstance(spec, str | Compressor):
        raise ValueError(f"{name} {spec!r}, expected a Compressor or a spec such as 'topk:ratio=1/64,bits=2'")
    return cast(Compressor, _spec.parse_spec(spec)) if isinstance(spec, str) else spec


def registered() -> dict[str, type[Compressor]]:
    """Return every registered compressor class by name."""
    return cast(dict[str, type[Compressor]], dict(_spec.REGISTRY))
