"""The algorithm hierarchical: dense inside a node, where the network is fast, and compressed between nodes.

It is a dense reduce-scatter over the ranks of a node, then any algorithm between nodes for each rank's share of the
sum, then a dense all-gather inside the node. So a node sends as much as a single rank in a world with one rank for each
node. A rank keeps the residual of its own share only.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ...kernels.joined import Flat
from ...kernels.updates import Update
from ..cost import DENSE, shares
from ..transport.operation import Operation
from .sharded import all_gather, reduce_scatter
from .stage import Exchanges, Outcome, Stage


def hierarchical(stage: Stage, inside: Operation, algorithm: Callable[[Stage], Exchanges], granule: int) -> Exchanges:
    """Run `algorithm` between nodes, for `stage`, and a dense all-reduce around it by the operation `inside`."""
    node = replace(stage, operation=inside, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    cut = shares(stage.tensor.numel(), granule, node.size)
    start, stop = cut[node.rank]
    # A residual outside this rank's share, kept with other shares or other nodes, is sent in the dense stage.
    kept = stage.residual
    residual = None if kept is None else kept[start:stop]
    strays = [] if kept is None else [part for part in (kept[:start], kept[stop:]) if bool(part.any())]
    if kept is not None and strays:
        whole = (stage.tensor + kept).to(stage.tensor.dtype)
        whole[start:stop] = stage.tensor[start:stop]
        node = replace(node, tensor=whole)
    total, _ = yield from reduce_scatter(node, cut)

    between = yield from algorithm(replace(stage, tensor=total, residual=residual))
    result = stage.empty(total.numel(), total.dtype).fill_(torch.nan)
    if between.finite:
        between.write(result)
    around = yield from all_gather(node, cut, result)

    def commit(gradient: Flat | None, update: Update | None) -> None:
        if update is not None and gradient is not None:
            with stage.report.clock("update"):
                update.advance(gradient, None)  # the compressed tensor is the sum of the node, not this rank's update
        between.commit(total, None)
        for part in strays:
            part.zero_()

    return Outcome(around.finite, commit, around.write)
