"""The compressed all-reduce: a sum with the same bits on every rank.

docs/collectives.md compares the algorithms, docs/design.md lists the modules.
"""

from .algorithms.leg import Report as Report
from .all_reduce import all_reduce_compressed as all_reduce_compressed
from .collective import Collective as Collective
from .elastic import ElasticGroup as ElasticGroup
from .flight import Handle as Handle
from .local import LocalGroup as LocalGroup
from .local import LocalWorld as LocalWorld
from .request import ShardState as ShardState
from .transport.errors import CollectiveError as CollectiveError
from .transport.errors import MismatchError as MismatchError
from .transport.errors import PeerError as PeerError
