"""The algorithm values: ranks that drew the same positions (RandomK) sum the kept values by a dense all-reduce."""

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.joined import Flat
from ...kernels.reference.dense import read_values
from ...kernels.updates import Update
from ..cost import DENSE
from .sharded import sharded
from .stage import Exchanges, Outcome, Stage


def values(stage: Stage) -> Exchanges:
    """Encode the tensor, and sum the values of all payloads by a dense all-reduce."""
    layout = stage.layout
    sent = stage.encode(
        stage.first, stage.tensor, residual=stage.residual, out=stage.buffer(layout.nbytes), key=stage.key
    )
    kept = read_values(sent.payload, layout.dtype)
    outcome = yield from sharded(
        replace(stage, tensor=kept, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    )

    def commit(gradient: Flat | None, update: Update | None) -> None:
        stage.commit(sent, gradient, residual=stage.residual, update=update)

    def write(out: Tensor) -> None:
        summed = torch.empty_like(kept)
        outcome.write(summed)
        with stage.report.clock("decode"):
            stage.first.decompress(replace(sent, payload=summed.view(torch.uint8)), out, stage.weight)

    return Outcome(outcome.finite, commit, write)
