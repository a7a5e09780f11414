"""Local steps: an exchange after every H steps (`thinwire.LocalSteps`), where sending every step is hopeless.

They are another algorithm, whose loss differs from that of a method that sends every step. So they are recommended only
where the fastest method that fits takes at least `HOPELESS` times a step without communication, and local steps are
faster by that factor.

A round of H steps ends with one exchange of the difference of the weights, E seconds of which C are the codec's. It is
under way for D steps, the smallest number that hides what can be hidden, at most H. With c seconds of a step without
communication, a step takes, as the mean over a round:

    c + (C + max(0, E - C - D c)) / H
"""

from collections.abc import Mapping, Sequence
from math import ceil

from thinwire.compressors import Compressor
from thinwire.tools.units import format_bytes, format_number, format_seconds

from .methods import Method
from .model import Case, Prediction

ROUNDS = (8, 32)  # Numbers of steps in a round that are predicted
HOPELESS = 2.0
WORTH = 1.05  # A longer round is chosen only if it is faster by this factor: its loss differs more


def predict_local(case: Case, spec: str, given: Compressor) -> list[tuple[int, int, float, float]]:
    """Return every, delay, and the seconds and bytes of a step, for rounds of each length.

    Return nothing for a sharded model, which LocalSteps refuses, and where their memory does not fit.
    """
    idle, method = case.without("compute"), Method(f"local steps {spec}", given)
    exchange = idle.predict(method)
    # Common weights, differences, and with a delay the weights when they were sent, besides the residual.
    if case.shard > 1 or not case.has_room(method, exchange.residual + exchange.buffers + 12 * case.numel):
        return []
    network = idle.without("codec").seconds(method)
    found = []
    for every in ROUNDS:
        delay = min(every, max(1, ceil(network / case.compute)))
        hidden = exchange.seconds - network + max(0.0, network - delay * case.compute)
        found.append((every, delay, case.compute + hidden / every, exchange.sent / every))
    return found


def advise_local(case: Case, predictions: Sequence[Prediction], made: Mapping[str, Compressor]) -> list[str]:
    """Return the local steps to use, by the compressor that sends the fewest bytes, as lines of text.

    Return nothing unless sending every step is hopeless and local steps are not.
    """
    spec = min(made, key=lambda name: made[name].nbytes(case.numel, case.dtype))
    found, every_step = predict_local(case, spec, made[spec]), [one for one in predictions if one.fits]
    if not found or not every_step:
        return []
    best, fastest = min(every_step, key=lambda one: one.seconds), min(seconds for _, _, seconds, _ in found)
    if best.seconds < HOPELESS * max(case.compute, fastest):
        return []
    every, delay, seconds, sent = next(one for one in found if one[2] <= WORTH * fastest)
    return [
        f"Sending every step is hopeless here: the fastest method ({best.method.name}) takes "
        f"{format_seconds(best.seconds)}, {format_number(best.seconds / case.compute)}x a step without communication. "
        f"Local steps, one exchange every {every} steps that is under way for {delay}, take {format_seconds(seconds)} "
        f"and send {format_bytes(sent)} per step. They are another algorithm, whose loss differs: docs/local-steps.md.",
        f"    optimizer = thinwire.LocalSteps(torch.optim.AdamW(model.parameters(), lr=...), every={every}, "
        f'compressor="{spec}", delay={delay}, model=model)  # without DDP',
        "If it has to be the algorithm that sends every step:",
    ]
