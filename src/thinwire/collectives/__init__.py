"""How compressed tensors become one sum with the same bits on every rank. docs/collectives.md compares the algorithms.

all_reduce      checks, hands over to the wire       gather, sharded, values, hierarchical   the algorithms
request         what is to be done, prepared once    stage      what the algorithms share
plan, cost      which algorithm, how many segments   wire       the thread that sends and receives
reduction       a request at work                    operation  one call on one group, agreed with the other ranks
channel         numbered operations of a group       link       messages over gloo or NCCL
"""

from .all_reduce import all_reduce_compressed
from .handle import Handle, Report
from .local import LocalGroup, LocalWorld
from .state import ShardState
from .transport.errors import CollectiveError, MismatchError, PeerError

__all__ = [
    "CollectiveError",
    "Handle",
    "LocalGroup",
    "LocalWorld",
    "MismatchError",
    "PeerError",
    "Report",
    "ShardState",
    "all_reduce_compressed",
]
