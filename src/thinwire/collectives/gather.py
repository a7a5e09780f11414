"""gather: every rank's payload to every rank, decoded in the order of ranks.

Exact in the sense that the sum is that of the decoded payloads and nothing else. The bytes grow with the world, so it
wins in small ones: (P - 1) payloads sent by each of P ranks.
"""

from torch import Tensor

from ..kernels.updates import Update
from .stage import Outcome, Stage


def gather(stage: Stage) -> Outcome:
    layout = stage.layout
    payloads = stage.buffer(stage.size, layout.nbytes)
    own = stage.encode(stage.first, stage.tensor, stage.residual, payloads[stage.rank], stage.key, stage.update)
    seen = stage.all_gather(list(payloads))

    def commit() -> None:
        stage.commit(own, stage.tensor, stage.residual)

    def write(out: Tensor) -> None:
        with stage.compute("decode"):
            stage.first.decompress(own, out, stage.weight, payloads=payloads)

    def settle(update: Update | None) -> None:
        with stage.compute("decode"):
            stage.first.settle(own, stage.tensor, stage.residual, payloads, stage.rank, stage.weight, update)

    return Outcome(stage.no_mark(seen, [layout] * stage.size), commit, write, settle)
