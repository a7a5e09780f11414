"""hierarchical: dense inside a node, where the wires are fast; compressed between nodes, each rank for one share.

Dense reduce-scatter over the ranks of a node, then any algorithm over the nodes for each rank's share of the sum, then
dense all-gather inside the node. Between nodes each rank sends what one share costs, so a node with Q ranks sends as
much as a single rank would in a flat world of nodes. A rank keeps the residual of its own share alone.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from .cost import DENSE, shares
from .operation import Operation
from .sharded import all_gather, reduce_scatter
from .stage import Outcome, Stage


def hierarchical(stage: Stage, inside: Operation, algorithm: Callable[[Stage], Outcome], granule: int) -> Outcome:
    """`stage` is on the operation between nodes; `inside` is the one of this rank's node."""
    node = replace(stage, operation=inside, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    cut = shares(stage.tensor.numel(), granule, node.size)
    total, _ = reduce_scatter(node, cut)

    start, stop = cut[node.rank]
    residual = None if stage.residual is None else stage.residual[start:stop]
    between = algorithm(replace(stage, tensor=total, residual=residual))
    result = torch.full_like(total, torch.nan)
    if between.finite:
        between.write(result)
    around = all_gather(node, cut, result)

    return Outcome(around.finite, between.commit, around.write)
