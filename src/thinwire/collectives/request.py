"""Check and plan the arguments of a call, and describe them for comparison with the other ranks.

A request depends on sizes and dtypes, not on values. In training, one request is made for each slice of a bucket and
used in every step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compressors import Compressor, format_spec
from ..compressors import compressor as parsed
from ..kernels.layout import RandomKLayout, residual_dtype
from .cost import Span, owned, shares
from .plan import Plan, choose, plan
from .transport.channel import Channel


class ShardState:
    """Residual of an owner in `algorithm="sharded"`. The caller keeps one for each tensor; it is empty until first use.

    `residual` is the part of the sum over ranks that this rank owns and has not sent, `spans` its elements. Each rank
    saves and loads its own with `state_dict` and `load_state_dict`.

    >>> state = ShardState()
    >>> state.residual is None
    True
    """

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.spans: list[Span] = []

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self.residual, "spans": [list(span) for span in self.spans]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the output of `state_dict`. Raise ValueError if the keys or the numel of the residual are wrong."""
        if set(state) != {"residual", "spans"}:
            raise ValueError(
                f"a state with {sorted(state)}, expected residual and spans, as from ShardState.state_dict"
            )
        residual, spans = state["residual"], [(int(start), int(stop)) for start, stop in state["spans"]]
        numel, given = sum(stop - start for start, stop in spans), 0 if residual is None else residual.numel()
        if given != numel:
            raise ValueError(f"a residual of {given} elements, expected {numel}")
        self.residual, self.spans = None if residual is None else residual.clone(), spans

    def prepare(self, spans: list[Span], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the residual, zeros on first use. Raise ValueError if it was made for other spans or another dtype."""
        if self.residual is None:
            numel = sum(stop - start for start, stop in spans)
            self.residual, self.spans = torch.zeros(numel, dtype=dtype, device=device), spans
        self.residual = self.residual.to(device)  # a checkpoint may have been loaded to another device
        if self.spans != spans or self.residual.dtype != dtype:
            raise ValueError(
                f"the state holds elements {_listed(self.spans)} as {self.residual.dtype} on {self.residual.device}, "
                f"expected {_listed(spans)} as {dtype} on {device}: it was made for another tensor, group or max_bytes"
            )
        return self.residual


def _listed(spans: list[Span]) -> str:
    shown = ", ".join(f"{start} to {stop}" for start, stop in spans[:3])
    return shown + (f" and {len(spans) - 3} more ranges" if len(spans) > 3 else "")


@dataclass(frozen=True)
class Request:
    """A checked and planned all-reduce for tensors of one shape."""

    channels: Sequence[Channel]
    plan: Plan
    weight: float
    text: str  # as JSON, the arguments that must be the same on all ranks
    positions_drawn: bool  # by the key, which must be the same on all ranks then
    draws: bool
    asked_for: Compressor  # compressor that the caller asked for, even if the plan is dense
    algorithm: str  # for reports: that of the plan, with "hierarchical, " in front if there are two stages

    @property
    def is_exchanged_at_once(self) -> bool:
        """Return whether there is one exchange of payloads, and nothing is encoded after it."""
        return self.algorithm == "gather"

    def owner_residuals(self, state: ShardState, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return the residual of this rank as an owner in "sharded", one tensor for each segment."""
        *nodes, channel = self.channels
        spans: list[Span] = []
        for start, stop in self.plan.segments:
            for node in nodes:  # this rank's share of the sum of its node
                low, high = shares(stop - start, self.plan.granule, node.size)[node.rank]
                start, stop = start + low, start + high
            encoded = residual_dtype(dtype) if nodes else dtype
            low, high = owned(self.plan.first, numel=stop - start, dtype=encoded, ranks=channel.size)[channel.rank]
            spans.append((start + low, start + high))
        kept = state.prepare(spans, residual_dtype(dtype), device)
        return list(kept.split([stop - start for start, stop in spans]))


def make_request(
    channels: Sequence[Channel],
    tensor: Tensor,
    compressor: Compressor | str,
    *,
    op: dist.ReduceOp.RedOpType,
    algorithm: str,
    shard_compressor: Compressor | str | None,
    has_residual: bool,
    state: ShardState | None,
    max_bytes: int,
) -> Request:
    """Check and plan a call for tensors like this one. Raise ValueError if it is not possible."""
    *nodes, channel = channels
    in_node = nodes[0].size if nodes else 1
    first = _shared(parsed(compressor), compressor)
    second = first.for_sum(channel.size) if shard_compressor is None else parsed(shard_compressor, "shard_compressor")
    sums = _shared(second, first if shard_compressor is None else shard_compressor)
    name = str(getattr(op, "name", op)).rpartition(".")[2]
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"op {name}, expected SUM or AVG: compressed tensors can only be summed; use dist.all_reduce")
    # Between nodes, a share of the node's sum is compressed.
    dtype, share = tensor.dtype, tensor.numel()
    if nodes:
        dtype, share = residual_dtype(dtype), -(-share // in_node)
    if state is not None and not isinstance(state, ShardState):
        raise ValueError(f"state {state!r}, expected a thinwire.ShardState")
    can_shard = state is not None or not has_residual  # without a state, the residual of owners would be lost
    chosen, reason = choose(algorithm, first, sums, share, dtype, channel.size, can_shard=can_shard)
    if chosen == "sharded" and not can_shard:
        raise ValueError(
            "algorithm 'sharded' with a residual but no state: the residuals of the owners would be lost; "
            "give state=thinwire.ShardState() and keep it beside the residual"
        )
    made = plan(
        chosen, reason, first, sums, numel=tensor.numel(), dtype=tensor.dtype, ranks=channel.size,
        ranks_in_node=in_node, max_bytes=max_bytes,
    )  # fmt: skip
    if chosen != "dense":  # a cached plan may hold an equal compressor, but statistics belong to this one
        made = replace(made, first=first, second=sums)
    described = {
        "compressor": format_spec(first),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "op": name,
        "algorithm": chosen,
        "shard_compressor": format_spec(sums) if chosen == "sharded" else None,
        "residual": has_residual,
        "state": state is not None if chosen == "sharded" else None,
        "segments": len(made.segments),
        "ranks": [in_node, channel.size],
    }
    return Request(
        channels=channels,
        plan=made,
        weight=1 / (in_node * channel.size) if op == dist.ReduceOp.AVG else 1.0,
        text=json.dumps(described),
        positions_drawn=isinstance(first.layout(share, dtype), RandomKLayout),
        draws=first.draws or sums.draws,
        asked_for=first,
        algorithm=("hierarchical, " if nodes else "") + chosen,
    )


def _shared(made: Compressor, given: object) -> Compressor:
    """Return what was given, or one object for all equal compressors that were made of something else."""
    return made if made is given else _first_of_equals(made)


@lru_cache(maxsize=256)
def _first_of_equals(made: Compressor) -> Compressor:
    """Return the first of equal compressors: on a GPU, the first use of a new one waits for its counters."""
    return made
