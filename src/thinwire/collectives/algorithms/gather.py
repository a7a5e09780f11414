"""The algorithm gather: every rank sends its payload to every rank, and decodes all payloads in the order of ranks.

There is no second compression. The bytes grow with the world size, so gather is best with few ranks.
"""

from torch import Tensor

from ...kernels.joined import Flat
from ...kernels.updates import Update
from .stage import Exchanges, Outcome, Stage, exchange_parts


def gather(stage: Stage) -> Exchanges:
    """Encode the tensor, and exchange the payloads of all ranks."""
    layout = stage.layout
    payloads = stage.buffers.next_buffer((stage.size, layout.nbytes), stage.tensor.device)
    rows = stage.buffers.parts_of(payloads)
    own = stage.encode(stage.first, stage.tensor, residual=stage.residual, out=rows[stage.rank], key=stage.key)
    exchanged = stage.on_host(rows)
    seen = yield from exchange_parts(stage.operation, exchanged)
    finite = stage.check_finite(seen, [layout] * stage.size)
    stage.fetch(rows, exchanged)

    def commit(gradient: Flat | None, update: Update | None) -> None:
        stage.commit(own, gradient, residual=stage.residual, update=update)

    def write(out: Tensor) -> None:
        with stage.report.clock("decode"):
            stage.first.decompress(own, out, stage.weight, payloads=payloads)

    def commit_and_write(gradient: Flat, update: Update | None, out: Tensor) -> None:
        with stage.report.clock("decode"):
            stage.first.apply(
                own,
                gradient,
                stage.residual,
                payloads=payloads,
                own=stage.rank,
                weight=stage.weight,
                update=update,
                out=out,
            )

    return Outcome(finite=finite, commit=commit, write=write, commit_and_write=commit_and_write)
