"""The algorithm gather: every rank sends its payload to every rank, and decodes all payloads in the order of ranks.

The result is the sum of the decoded payloads, without a second compression. Each of P ranks sends P - 1 payloads. The
bytes grow with the world size, so gather is best with few ranks.
"""

import torch
from torch import Tensor

from ...kernels.updates import Update
from .stage import Outcome, Run, Stage


def gather(stage: Stage) -> Run:
    """Encode the tensor, and exchange the payloads of all ranks."""
    layout = stage.layout
    payloads = stage.buffers.take((stage.size, layout.nbytes), stage.tensor.device)
    rows = stage.buffers.parts_of(payloads)
    own = stage.encode(stage.first, stage.tensor, stage.residual, rows[stage.rank], stage.key)
    exchanged = stage.on_host(rows)
    seen = yield from stage.all_gather(exchanged)

    def fetch() -> None:
        if exchanged is not rows:
            torch._foreach_copy_(list(rows), list(exchanged), non_blocking=True)

    def keep(gradient: Tensor | None, update: Update | None) -> None:
        stage.keep(own, gradient, stage.residual, update)

    def write(out: Tensor) -> None:
        with stage.clock("decode"):
            fetch()
            stage.first.decompress(own, out, stage.weight, payloads=payloads)

    def settle(gradient: Tensor, update: Update | None, out: Tensor) -> None:
        with stage.clock("decode"):
            fetch()
            stage.first.settle(own, gradient, stage.residual, payloads, stage.rank, stage.weight, update, out)

    return Outcome(stage.judge(seen, [layout] * stage.size), keep, write, settle)
