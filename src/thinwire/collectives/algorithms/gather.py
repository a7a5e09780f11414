"""The algorithm gather: every rank sends its payload to every rank, and decodes all payloads in the order of ranks.

There is no second compression. The bytes grow with the world size, so gather is best with few ranks.
"""

from .leg import Leg, Story, exchange_parts


def gather(leg: Leg) -> Story:
    """Encode the tensor, exchange the payloads of all ranks, and sum them."""
    payloads = leg.buffer(leg.size, leg.layout.nbytes)
    rows = leg.memory.parts_of(payloads)
    leg.encode(leg.first, leg.tensor, leg.residual, out=rows[leg.rank])
    exchanged = leg.on_host(rows)
    seen = yield from exchange_parts(leg.operation, exchanged)
    finite = leg.check_finite(seen, [leg.layout] * leg.size)
    leg.fetch(rows, exchanged)
    landing = yield finite
    leg.apply(payloads, landing)
