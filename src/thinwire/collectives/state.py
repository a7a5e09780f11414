"""The residual of the second compression in "sharded", kept by the owner of a share."""

from typing import Any

import torch
from torch import Tensor

from .cost import Span


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
