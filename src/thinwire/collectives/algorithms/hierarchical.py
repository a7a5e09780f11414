"""The algorithm hierarchical: dense inside a node, where the network is fast, and compressed between nodes.

It is a dense reduce-scatter over the ranks of a node, then any algorithm between nodes for each rank's share of the
sum, then a dense all-gather inside the node. So a node sends as much as a single rank in a world with one rank for each
node. A rank keeps the residual of its own share only.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..cost import DENSE, shares
from ..transport.operation import Operation
from .leg import Landing, Leg, Story, land, until_known
from .sharded import all_gather, reduce_scatter


def hierarchical(leg: Leg, inside: Operation, algorithm: Callable[[Leg], Story], granule: int) -> Story:
    """Run `algorithm` between nodes, for `leg`, and a dense all-reduce around it by the operation `inside`."""
    node = replace(leg, operation=inside, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    cut = shares(leg.tensor.numel(), granule, node.size)
    start, stop = cut[node.rank]
    # A residual outside this rank's share, kept with other shares or other nodes, is sent in the dense stage.
    kept = leg.residual
    residual = None if kept is None else kept[start:stop]
    strays = [] if kept is None else [part for part in (kept[:start], kept[stop:]) if bool(part.any())]
    if kept is not None and strays:
        whole = (leg.tensor + kept).to(leg.tensor.dtype)
        whole[start:stop] = leg.tensor[start:stop]
        node = replace(node, tensor=whole)
    total = yield from reduce_scatter(node, cut)

    between = algorithm(replace(leg, tensor=total, residual=residual))
    finite = yield from until_known(between)
    result = leg.empty(total.numel(), total.dtype).fill_(torch.nan)
    if finite:
        land(between, Landing(result))  # the residuals wait
    finite, write = yield from all_gather(node, cut, result)
    landing = yield finite
    leg.commit(landing)
    for part in strays:
        part.zero_()
    write(landing.out)
