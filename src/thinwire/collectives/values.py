"""values: ranks that drew the same positions (RandomK) sum the kept values, by a plain all-reduce."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..kernels.reference.dense import read_values
from .cost import DENSE
from .sharded import sharded
from .stage import Outcome, Stage


def values(stage: Stage) -> Outcome:
    layout = stage.layout
    sent = stage.encode(stage.first, stage.tensor, stage.residual, stage.buffer(layout.nbytes), stage.key)
    kept = read_values(sent.ct.payload, layout.dtype)
    outcome = sharded(
        replace(stage, tensor=kept, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    )

    def write(out: Tensor) -> None:
        summed = torch.empty_like(kept)
        outcome.write(summed)
        with stage.compute("decode"):
            stage.first.decompress(replace(sent.ct, payload=summed.view(torch.uint8)), out, stage.weight)

    return Outcome(outcome.finite, partial(stage.settle, sent), write)
