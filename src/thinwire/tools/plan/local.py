"""Predict local steps: an exchange after every H steps (`thinwire.LocalSteps`), and whether to think of them at all.

They are another algorithm, whose loss differs from that of a method that sends every step. So they are not compared
with these in one table, and are recommended only where sending every step is hopeless: where the fastest usable method
takes at least `HOPELESS` times a step without communication, and local steps are faster by that factor.

A round of H steps ends with one exchange of the difference of the weights, E seconds of which C are the codec's. With c
seconds of a step without communication:

    waits           c + E / H
    delay of D      c + (C + max(0, E - C - D c)) / H        the exchange is under way for D steps

D is the smallest number of steps that hides what can be hidden, at most H.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from thinwire.compressors import Compressor
from thinwire.tools.units import LONGEST_ROUND_TRIP, SLOWEST, format_bytes, format_number, format_rate, format_seconds

from .methods import Method
from .model import Case, Prediction
from .shared import LOCAL, print_table

ROUNDS = (8, 32)
"""Numbers of steps in a round that are predicted."""
HOPELESS = 2.0
WORTH = 1.05
"""A longer round is chosen only if it is faster by this factor: its loss differs more."""
PAGE = "docs/local-steps.md"
_SHORTEST = 1e-6


@dataclass(frozen=True)
class LocalPrediction:
    """Predicted time, bytes and memory of local steps, by the step."""

    spec: str
    every: int
    delay: int
    """Number of steps for which an exchange is under way, so that it is hidden as far as possible."""
    waiting: float
    """Seconds of a step, the mean over a round, if ranks wait for the exchange."""
    overlapped: float
    """Seconds of a step with this delay."""
    sent: float
    memory: float
    """Bytes of common weights, residual, differences and payloads."""
    fits: bool


def predict_local(case: Case, made: Mapping[str, Compressor]) -> list[LocalPrediction]:
    """Predict rounds of each length with the compressor that sends the fewest bytes.

    Return nothing for a sharded model, which LocalSteps refuses.
    """
    if case.shard > 1 or not made:
        return []
    spec = min(made, key=lambda name: made[name].nbytes(case.work.numel, case.work.dtype))
    idle = replace(case, work=replace(case.work, forward=0.0, backward=0.0, optimizer=0.0))
    exchange = idle.predict(Method(f"{LOCAL} {spec}", made[spec]))
    codec = idle.without_network().seconds(exchange.method)
    compute, network = case.work.seconds, max(0.0, exchange.seconds - codec)
    # Common weights, differences, and with a delay the weights when they were sent, besides the residual.
    memory = exchange.residual + exchange.buffers + 12 * case.work.numel
    room = case.cluster.memory
    fits = exchange.fits and (room is None or case.training_bytes(exchange.method) + memory <= room)
    found = []
    for every in ROUNDS:
        delay = min(every, max(1, ceil(network / compute)))
        hidden = codec + max(0.0, network - delay * compute)
        found.append(
            LocalPrediction(
                spec=spec,
                every=every,
                delay=delay,
                waiting=compute + exchange.seconds / every,
                overlapped=compute + hidden / every,
                sent=exchange.sent / every,
                memory=memory,
                fits=fits,
            )
        )
    return found


def print_local(found: Sequence[LocalPrediction], dense: float) -> None:
    """Print a table of local steps, of their own since their loss differs. `dense` is the time of a dense step."""
    title = f"Local steps, another algorithm whose loss differs ({PAGE}): mean of a step over a round"
    lines = [
        {
            "method": f"{LOCAL} {one.every} {one.spec}",
            "step": format_seconds(one.waiting),
            "overlapped": f"delay={one.delay}",
            "step, overlapped": format_seconds(one.overlapped),
            "speed-up": f"{format_number(dense / one.overlapped)}x",
            "sent": format_bytes(one.sent),
            "memory": format_bytes(one.memory),
            "": "" if one.fits else "does not fit",
        }
        for one in found
    ]
    if lines:
        print_table(title, lines, text=("method", "overlapped", ""))


def choose_local(
    case: Case, predictions: Sequence[Prediction], found: Sequence[LocalPrediction]
) -> LocalPrediction | None:
    """Return the local steps to recommend, or None unless sending every step is hopeless and local steps are not."""
    usable, possible = [one.seconds for one in predictions if one.is_usable], [one for one in found if one.fits]
    if not usable or not possible:
        return None
    fastest = min(one.overlapped for one in possible)
    if min(usable) < HOPELESS * max(case.work.seconds, fastest):
        return None
    return next(one for one in possible if one.overlapped <= WORTH * fastest)


def advise_local(case: Case, predictions: Sequence[Prediction], found: Sequence[LocalPrediction]) -> list[str]:
    """Return what to say of local steps before the advice on methods that send every step, as lines of text."""
    chosen = choose_local(case, predictions, found)
    if chosen is None:
        return []
    best = min((one for one in predictions if one.is_usable), key=lambda one: one.seconds)
    factor = format_number(best.seconds / case.work.seconds)
    return [
        f"Sending every step is hopeless here: the fastest method ({best.method.name}) takes "
        f"{format_seconds(best.seconds)}, {factor}x a step without communication. Local steps, one exchange every "
        f"{chosen.every} steps that is under way for {chosen.delay}, take {format_seconds(chosen.overlapped)} and send "
        f"{format_bytes(chosen.sent)} per step. They are another algorithm, whose loss differs: {PAGE}.",
        f"    optimizer = thinwire.LocalSteps(torch.optim.AdamW(model.parameters(), lr=...), every={chosen.every}, "
        f'compressor="{chosen.spec}", delay={chosen.delay}, model=model)  # without DDP',
        "If it has to be the algorithm that sends every step:",
    ]


def pays_from(case: Case, predictions: Sequence[Prediction], made: Mapping[str, Compressor]) -> list[str]:
    """Return from which bandwidth or latency on sending every step is hopeless, as a line of text.

    Return nothing if it is hopeless here, or never.
    """
    if case.shard > 1 or not made:
        return []
    methods = [one.method for one in predictions if one.is_usable]

    def is_hopeless(there: Case) -> bool:
        return bool(methods) and min(map(there.seconds, methods)) >= HOPELESS * there.work.seconds

    if is_hopeless(case):
        return []
    parts = []
    if is_hopeless(case.at(rate=SLOWEST)):
        rate = boundary(lambda rate: is_hopeless(case.at(rate=rate)), SLOWEST, case.cluster.rate)
        parts.append(f"links below about {format_rate(float(f'{rate:.2g}'))}")
    if is_hopeless(case.at(latency=LONGEST_ROUND_TRIP)):
        least = max(_SHORTEST, case.cluster.latency)
        latency = boundary(lambda seconds: is_hopeless(case.at(latency=seconds)), LONGEST_ROUND_TRIP, least)
        parts.append(f"a latency above about {format_seconds(latency)}")
    if not parts:
        return []
    return [
        f"Local steps ({PAGE}), whose loss differs, are for {' or '.join(parts)}: there, all else being equal, every "
        f"method that sends every step takes {HOPELESS:g}x a step without communication or more."
    ]


def boundary(holds: Callable[[float], bool], true: float, false: float) -> float:
    """Return the last value, from `true` towards `false`, for which `holds` is true, to 1 %."""
    while not 1 / 1.01 < true / false < 1.01:
        middle = (true * false) ** 0.5
        true, false = (middle, false) if holds(middle) else (true, middle)
    return true
