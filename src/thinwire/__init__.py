"""thinwire: train PyTorch models over slow networks, with a two-hundredth of the bytes of a dense all-reduce.

>>> import torch, thinwire
>>> grad, residual = torch.randn(1_000_000), torch.zeros(1_000_000)
>>> ct = thinwire.compressor("topk:ratio=1/64,bits=2").compress(grad, residual)
>>> round(4 * grad.numel() / ct.nbytes)
195
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import kernels as kernels
    from .collectives import CollectiveError as CollectiveError
    from .collectives import LocalWorld as LocalWorld
    from .collectives import MismatchError as MismatchError
    from .collectives import PeerError as PeerError
    from .collectives import ShardState as ShardState
    from .collectives import all_reduce_compressed as all_reduce_compressed
    from .compressors import CompressedTensor as CompressedTensor
    from .compressors import Compressor as Compressor
    from .compressors import NoCompression as NoCompression
    from .compressors import Quantize as Quantize
    from .compressors import RandomK as RandomK
    from .compressors import TopK as TopK
    from .compressors import compressor as compressor
    from .compressors import format_spec as format_spec
    from .compressors import register_compressor as register_compressor
    from .compressors import registered as registered
    from .compressors.frame import FrameError as FrameError
    from .compressors.statistics import Statistics as Statistics
    from .integrations import attach as attach
    from .optim import SGD as SGD
    from .optim import AdamW as AdamW
    from .sync.policy import Policy as Policy
    from .sync.policy import default_compressor as default_compressor
    from .sync.policy import ramp as ramp
    from .sync.ranked import load_per_rank as load_per_rank
    from .sync.ranked import per_rank as per_rank
    from .sync.synchronizer import Synchronizer as Synchronizer

# Loaded on first use: `thinwire --help` must not wait for torch.
_HOME = {
    "kernels": ".kernels",
    "FrameError": ".compressors.frame",
    "Statistics": ".compressors.statistics",
    "Synchronizer": ".sync.synchronizer",
    "attach": ".integrations",
    **dict.fromkeys(["Policy", "default_compressor", "ramp"], ".sync.policy"),
    **dict.fromkeys(["AdamW", "SGD"], ".optim"),
    **dict.fromkeys(["load_per_rank", "per_rank"], ".sync.ranked"),
    **dict.fromkeys(
        ["CollectiveError", "LocalWorld", "MismatchError", "PeerError", "ShardState", "all_reduce_compressed"],
        ".collectives",
    ),
    **dict.fromkeys(
        [
            "CompressedTensor", "Compressor", "NoCompression", "Quantize", "RandomK", "TopK",
            "compressor", "format_spec", "register_compressor", "registered",
        ],
        ".compressors",
    ),
}  # fmt: skip

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name], __name__)
    return module if name == "kernels" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
