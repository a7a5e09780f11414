"""The public names of thinwire, once: for type checkers, and for `__init__.py`, which loads each on first use."""

from . import kernels as kernels
from .collectives import Collective as Collective
from .collectives import CollectiveError as CollectiveError
from .collectives import ElasticGroup as ElasticGroup
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
from .compressors.by_ranks import default_compressor as default_compressor
from .compressors.frame import FrameError as FrameError
from .compressors.statistics import Statistics as Statistics
from .integrations import attach as attach
from .optim import SGD as SGD
from .optim import AdamW as AdamW
from .optim import LocalSteps as LocalSteps
from .sync.policy import Policy as Policy
from .sync.policy import ramp as ramp
from .sync.ranked import load_per_rank as load_per_rank
from .sync.ranked import per_rank as per_rank
from .sync.synchronizer import Synchronizer as Synchronizer

__version__: str
