"""hierarchical: dense inside a node, where the wires are fast; compressed between nodes, each rank for one share.

Dense reduce-scatter over the ranks of a node, then any algorithm over the nodes for each rank's share of the sum, then
dense all-gather inside the node. Between nodes each rank sends what one share costs, so a node with Q ranks sends as
much as a single rank would in a flat world of nodes. A rank keeps the residual of its own share alone.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.updates import Update
from ..cost import DENSE, shares
from ..transport.operation import Operation
from .sharded import all_gather, reduce_scatter
from .stage import Outcome, Run, Stage


def hierarchical(stage: Stage, inside: Operation, algorithm: Callable[[Stage], Run], granule: int) -> Run:
    """`stage` is on the operation between nodes; `inside` is the one of this rank's node."""
    node = replace(stage, operation=inside, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    cut = shares(stage.tensor.numel(), granule, node.size)
    start, stop = cut[node.rank]
    # What was kept when shares were cut otherwise, or by a run with other nodes, is sent in the dense stage.
    residual = None if stage.residual is None else stage.residual[start:stop]
    strays = [] if stage.residual is None else [stage.residual[:start], stage.residual[stop:]]
    strays = [part for part in strays if bool(part.any())]
    if strays and stage.residual is not None and residual is not None:
        whole = (stage.tensor + stage.residual).to(stage.tensor.dtype)
        whole[start:stop] = stage.tensor[start:stop]
        node = replace(node, tensor=whole)
    total, _ = yield from reduce_scatter(node, cut)

    between = yield from algorithm(replace(stage, tensor=total, residual=residual))
    result = stage.empty(total.numel(), total.dtype).fill_(torch.nan)
    if between.finite:
        between.write(result)
    around = yield from all_gather(node, cut, result)

    def keep(gradient: Tensor | None, update: Update | None) -> None:
        if update is not None and gradient is not None:
            with stage.clock("update"):
                update.advance(gradient, None)  # what was compressed is the sum of the node, not this rank's update
        between.keep(total, None)
        for part in strays:
            part.zero_()

    return Outcome(around.finite, keep, around.write)
