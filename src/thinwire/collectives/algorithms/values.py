"""The algorithm values: ranks that drew the same positions (RandomK) sum the kept values by a dense all-reduce."""

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.reference.dense import read_values
from ...kernels.updates import Update
from ..cost import DENSE
from .sharded import sharded
from .stage import Outcome, Run, Stage


def values(stage: Stage) -> Run:
    """Encode the tensor, and sum the values of all payloads by a dense all-reduce."""
    layout = stage.layout
    sent = stage.encode(stage.first, stage.tensor, stage.residual, stage.buffer(layout.nbytes), stage.key)
    kept = read_values(sent.payload, layout.dtype)
    outcome = yield from sharded(
        replace(stage, tensor=kept, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    )

    def keep(gradient: Tensor | None, update: Update | None) -> None:
        stage.keep(sent, gradient, stage.residual, update)

    def write(out: Tensor) -> None:
        summed = torch.empty_like(kept)
        outcome.write(summed)
        with stage.clock("decode"):
            stage.first.decompress(replace(sent, payload=summed.view(torch.uint8)), out, stage.weight)

    return Outcome(outcome.finite, keep, write)
