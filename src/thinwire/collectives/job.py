"""From what a caller gave to what is to be done: checked, planned, and described for the other ranks to compare."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch.distributed as dist
from torch import Tensor

from ..compressors import Compressor, NoCompression, format_spec
from ..compressors import compressor as parsed
from ..compressors.spec import mix_key
from ..kernels.layout import RandomKLayout, residual_dtype
from .cost import Span, owned, shares
from .handle import Report
from .operation import Operation
from .plan import Plan, choose, plan
from .state import ShardState

_WHY_NOT = {
    "PRODUCT": "an entry that is not sent would count as 0, and make every product 0",
    "MIN": "an entry that is not sent would count as 0, which may be less than the rest",
    "MAX": "an entry that is not sent would count as 0, which may be more than the rest",
}


@dataclass(frozen=True)
class Call:
    """The arguments of `all_reduce_compressed`."""

    tensor: Tensor
    compressor: Compressor | str
    residual: Tensor | None
    op: dist.ReduceOp.RedOpType
    algorithm: str
    key: int | None
    second: Compressor | str | None
    state: ShardState | None
    max_bytes: int


@dataclass(frozen=True)
class Job:
    """One call, checked and planned."""

    result: Tensor
    """The caller's tensor."""
    tensor: Tensor
    """The same, flat; as all that follow."""
    residual: Tensor | None
    owner_residuals: list[Tensor | None]
    """By segment."""
    operations: list[Operation]
    """The one inside the node, if there are two stages, and the compressed one."""
    plan: Plan
    key: int | None
    weight: float
    passes_on: bool
    """Nothing to compress and nothing kept: torch's own all-reduce does it."""
    report: Report


def prepare(call: Call, operations: list[Operation]) -> Job:
    """ValueError for what cannot be done."""
    tensor, residual, state = call.tensor, call.residual, call.state
    *nodes, channel = [operation.channel for operation in operations]
    in_node = nodes[0].size if nodes else 1
    first = _made(call.compressor)
    if call.second is None:
        made_of_first = first.for_sum(channel.size)
        second = first if made_of_first is first else _kept(made_of_first)
    else:
        second = _made(call.second, "second")
    passes_on = (
        isinstance(first, NoCompression)
        and residual is None
        and not nodes
        and call.algorithm in ("auto", "dense")
        and channel.group is not None  # torch knows nothing of ranks that are threads
    )
    op = _op_name(call.op, passes_on)

    # Between nodes it is a share of the node's sum that is compressed.
    dtype, share = tensor.dtype, tensor.numel()
    if nodes:
        dtype, share = residual_dtype(dtype), -(-share // in_node)
    positions_drawn = isinstance(first.layout(share, dtype), RandomKLayout)
    key = call.key
    if key is None and (first.draws or second.draws):
        number = operations[-1].number
        key = number if positions_drawn else mix_key(number, channel.ranks[channel.rank])
    if key is not None and type(key) is not int:
        raise ValueError(f"key {key!r}, expected a whole number, such as that of the step")
    if state is not None and not isinstance(state, ShardState):
        raise ValueError(f"state {state!r}, expected a thinwire.ShardState")
    if residual is not None and not isinstance(residual, Tensor):
        raise ValueError(f"residual of type {type(residual).__name__}, expected a tensor or None")
    first.check_input(tensor, residual, key)
    can_shard = state is not None or residual is None  # else what owners do not send on would be lost
    algorithm, reason = choose(call.algorithm, first, second, share, dtype, channel.size, can_shard=can_shard)
    if algorithm == "sharded":
        _check_state(state, residual, second)
    made = plan(
        algorithm, reason, first, second, tensor.numel(), tensor.dtype, channel.size, in_node, call.max_bytes
    )  # fmt: skip
    if algorithm != "dense":  # plans are kept, and may be those of equal compressors; but each counts what it does
        made = replace(made, first=first, second=second)
    owner_residuals: list[Tensor | None] = [None] * len(made.segments)
    if state is not None and algorithm == "sharded":
        spans = _owned_spans(made, tensor, operations)
        kept = state.prepare(spans, residual_dtype(tensor.dtype), tensor.device)
        owner_residuals = list(kept.split([stop - start for start, stop in spans]))

    described = {
        "spec": format_spec(first),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "op": op,
        "algorithm": algorithm,
        "second": format_spec(second) if algorithm == "sharded" else None,
        "residual": residual is not None,
        "state": state is not None if algorithm == "sharded" else None,
        "segments": len(made.segments),
        "ranks": [in_node, channel.size],
    }
    for operation in operations:  # positions are drawn alike by those who sum them: the ranks of the last group
        operation.describe(described, key if positions_drawn and operation is operations[-1] else None)
    return Job(
        tensor,
        tensor.detach().view(-1),
        None if residual is None else residual.detach().view(-1),
        owner_residuals,
        operations,
        made,
        key,
        1 / (in_node * channel.size) if op == "AVG" else 1.0,
        passes_on,
        Report(("hierarchical, " if nodes else "") + algorithm, reason, len(made.segments), made.cost.memory),
    )


def _made(given: Compressor | str, name: str = "compressor") -> Compressor:
    """Of a spec, always the same object."""
    made = parsed(given, name)
    return made if made is given else _kept(made)


@lru_cache(maxsize=256)
def _kept(made: Compressor) -> Compressor:
    """One for all equal ones, which nobody but us can see: on a GPU each begins with waiting for its counters."""
    return made


def _op_name(op: object, passes_on: bool) -> str:
    name = str(getattr(op, "name", op)).rpartition(".")[2]
    if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or (passes_on and name in _WHY_NOT):
        return name
    if name in _WHY_NOT:
        use = f"for {name} use the compressor 'none' without a residual"
        raise ValueError(f"op {name}, expected SUM or AVG: {_WHY_NOT[name]}; {use}")
    raise ValueError(f"op {name}, expected SUM or AVG: what is compressed can only be added up")


def _check_state(state: ShardState | None, residual: Tensor | None, second: Compressor) -> None:
    if state is None and residual is not None:
        raise ValueError(
            "algorithm 'sharded' with a residual but no state: what owners do not send on would be lost; give "
            "state=thinwire.ShardState() and keep it beside the residual"
        )
    if state is not None and not second.contracts:
        raise ValueError(f"second {format_spec(second)}, whose residual would grow for ever; use another rounding")


def _owned_spans(made: Plan, tensor: Tensor, operations: list[Operation]) -> list[Span]:
    """Which entries of each segment this rank owns."""
    *nodes, channel = [operation.channel for operation in operations]
    dtype = residual_dtype(tensor.dtype) if nodes else tensor.dtype
    spans: list[Span] = []
    for start, stop in made.segments:
        if nodes:
            low, high = shares(stop - start, made.granule, nodes[0].size)[nodes[0].rank]
            start, stop = start + low, start + high
        low, high = owned(made.first, stop - start, dtype, channel.size)[channel.rank]
        spans.append((start + low, start + high))
    return spans
