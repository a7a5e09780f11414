"""values: ranks that drew the same positions (RandomK) sum the kept values, by a plain all-reduce."""

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.reference.dense import read_values
from .cost import DENSE
from .sharded import sharded
from .stage import Outcome, Stage


def values(stage: Stage) -> Outcome:
    layout = stage.layout
    sent = stage.encode(stage.first, stage.tensor, stage.residual, stage.buffer(layout.nbytes), stage.key)
    kept = read_values(sent.payload, layout.dtype)
    outcome = sharded(
        replace(stage, tensor=kept, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    )

    def commit() -> None:
        stage.commit(sent, stage.tensor, stage.residual)

    def write(out: Tensor) -> None:
        summed = torch.empty_like(kept)
        outcome.write(summed)
        with stage.compute("decode"):
            stage.first.decompress(replace(sent, payload=summed.view(torch.uint8)), out, stage.weight)

    return Outcome(outcome.finite, commit, write)
