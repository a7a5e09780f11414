"""The compressed all-reduce: a sum with the same bits on every rank. docs/collectives.md compares the algorithms.

all_reduce      checks a call and submits it         gather, sharded, values, hierarchical   the algorithms
request         checked and planned arguments        stage      the common parts of the algorithms
plan, cost      choice of algorithm and segments     wire       the thread that sends and receives
reduction       the execution of a request           operation  one call on one group, compared between ranks
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
