"""gather: every rank's payload to every rank, decoded in the order of ranks.

Exact in the sense that the sum is that of the decoded payloads and nothing else. The bytes grow with the world, so it
wins in small ones: (P - 1) payloads sent by each of P ranks.
"""

from torch import Tensor

from ..kernels.updates import Update
from .stage import Outcome, Run, Stage


def gather(stage: Stage) -> Run:
    layout = stage.layout
    payloads = stage.buffer(stage.size, layout.nbytes)
    own = stage.encode(stage.first, stage.tensor, stage.residual, payloads[stage.rank], stage.key)
    seen = yield from stage.all_gather(list(payloads))

    def keep(gradient: Tensor | None, update: Update | None) -> None:
        stage.keep(own, gradient, stage.residual, update)

    def write(out: Tensor) -> None:
        with stage.clock("decode"):
            stage.first.decompress(own, out, stage.weight, payloads=payloads)

    def settle(gradient: Tensor, update: Update | None, out: Tensor) -> None:
        with stage.clock("decode"):
            stage.first.settle(own, gradient, stage.residual, payloads, stage.rank, stage.weight, update, out)

    return Outcome(stage.judge(seen, [layout] * stage.size), keep, write, settle)
