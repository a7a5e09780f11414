"""What the owner of a share has not sent on so far: the residual of the second compression."""

from typing import Any

import torch
from torch import Tensor

from .cost import Span


class ShardState:
    """Kept by the caller, one for each tensor that is reduced by `algorithm="sharded"`; empty until its first use.

    `residual` is the part of the sum over ranks that this rank owns and has not sent on. `spans` says which entries of
    the tensor these are. Saved and loaded with `state_dict` and `load_state_dict`, by every rank its own.

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
        if set(state) != {"residual", "spans"}:
            raise ValueError(
                f"a state with {sorted(state)}, expected residual and spans, as from ShardState.state_dict"
            )
        residual, spans = state["residual"], [(int(start), int(stop)) for start, stop in state["spans"]]
        entries = sum(stop - start for start, stop in spans)
        if (0 if residual is None else residual.numel()) != entries:
            raise ValueError(
                f"a residual of {None if residual is None else residual.numel()} entries, expected {entries}"
            )
        self.residual, self.spans = None if residual is None else residual.clone(), spans

    def prepare(self, spans: list[Span], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The residual for these entries: zeros on first use."""
        if self.residual is None:
            entries = sum(stop - start for start, stop in spans)
            self.residual, self.spans = torch.zeros(entries, dtype=dtype, device=device), spans
        self.residual = self.residual.to(device)  # where a checkpoint was loaded to another one
        if self.spans != spans or self.residual.dtype != dtype:
            raise ValueError(
                f"the state holds entries {_listed(self.spans)} as {self.residual.dtype} on {self.residual.device}, "
                f"expected {_listed(spans)} as {dtype} on {device}: it was made for another tensor, group or max_bytes"
            )
        return self.residual


def _listed(spans: list[Span]) -> str:
    shown = ", ".join(f"{start} to {stop}" for start, stop in spans[:3])
    return shown + (f" and {len(spans) - 3} more runs" if len(spans) > 3 else "")
