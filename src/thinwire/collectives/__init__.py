"""The compressed all-reduce: a sum with the same bits on every rank. docs/collectives.md compares the algorithms.

all_reduce      checks a call and submits it         gather, sharded, values, hierarchical   the algorithms
request         checked and planned arguments        stage      the common parts of the algorithms
plan, cost      choice of algorithm and segments     wire       the thread that sends and receives
reduction       the execution of a request           operation  one call on one group, compared between ranks
channel         numbered operations of a group       link       messages over gloo or NCCL
"""

from .all_reduce import all_reduce_compressed as all_reduce_compressed
from .elastic import ElasticGroup as ElasticGroup
from .handle import Handle as Handle
from .handle import Report as Report
from .local import LocalGroup as LocalGroup
from .local import LocalWorld as LocalWorld
from .state import ShardState as ShardState
from .transport.errors import CollectiveError as CollectiveError
from .transport.errors import MismatchError as MismatchError
from .transport.errors import PeerError as PeerError
