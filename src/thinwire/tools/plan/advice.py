"""Recommend the simplest way that is nearly as fast as the fastest, and the bandwidth up to which it pays off."""

from collections.abc import Sequence
from dataclasses import replace

from thinwire.compressors import Compressor

from .model import Case, Prediction
from .units import show_bytes, show_rate, show_seconds
from .ways import DENSE, FP16, HALVES, Way, is_auto

WORTH = 1.05
"""Smallest speed-up that justifies a less simple way: compression costs memory, and the loss must be checked."""
SLOWEST, FASTEST = 1e5, 1e13


def advise(case: Case, predictions: Sequence[Prediction], made: dict[str, Compressor]) -> list[str]:
    """Return the advice as lines of text; the first line is the recommendation."""
    dense = predictions[0]
    best, chosen = min(predictions, key=lambda one: one.seconds), choose(case, predictions, made)
    if chosen.way.spec == DENSE:
        others = min(predictions[1:], key=lambda one: one.seconds)
        return [
            f"Do not compress: a dense step takes {show_seconds(dense.seconds)}, {_waiting(case, dense)}, and the "
            f"quickest other way ({_named(others.way)}) {show_seconds(others.seconds)}.",
            *_worth(case, _on_slow_links(case, predictions), "Compression would pay"),
        ]
    used, between = chosen.footprint, " between hosts" if chosen.way.in_hosts else ""
    lines = [
        f"Use {_named(chosen.way)}: {show_seconds(chosen.seconds)} a step, {dense.seconds / chosen.seconds:.2f} times "
        f"the speed of dense ({show_seconds(dense.seconds)}, {_waiting(case, dense)}); it sends "
        f"{show_bytes(used.sent - used.inside)}{between} and not {show_bytes(dense.footprint.sent)}, and takes "
        f"{show_bytes(used.residual + used.buffers)} of memory.",
        f"    {_code(chosen.way, made, case)}",
        *_worth(case, chosen.way, "It pays"),
    ]
    if best.way.spec != chosen.way.spec:
        gain = chosen.seconds / best.seconds - 1
        lines.append(f"{_named(best.way)} would be {gain:.1%} quicker still, which is not worth its price.")
    if chosen.way.compresses:
        lines.append("What it does to the loss is not predicted: docs/training.md says what was measured.")
    return lines


def choose(case: Case, predictions: Sequence[Prediction], made: dict[str, Compressor]) -> Prediction:
    """Return the prediction of the simplest way that takes at most `WORTH` times as long as the fastest.

    From simple to complex, the ways are: dense, 16 bits, compressors that send every element, sparse compressors. Among
    equally simple ways, the compressor that comes first in `made` wins, then the algorithm that "auto" chooses, then
    the fastest way.
    """
    best = min(one.seconds for one in predictions)
    near = [one for one in predictions if one.seconds <= WORTH * best]
    order = list(made)

    def price(one: Prediction) -> tuple[int, int, bool, float]:
        way = one.way
        if not way.compresses:
            return int(way.spec in HALVES), 0, False, one.seconds
        asked = not is_auto(way, made[way.spec], case.work, case.cluster)
        return 3 if made[way.spec].sparse else 2, order.index(way.spec), asked, one.seconds

    return min(near, key=price)


def pays_below(case: Case, way: Way) -> float | None:
    """Return the bandwidth, in bits per second, up to which a way is faster than dense by the factor `WORTH`.

    Return None if it is not faster even at `SLOWEST`, and infinity if it is faster even at `FASTEST`.
    """

    def pays(rate: float) -> bool:
        there = replace(case, cluster=case.cluster.at(rate=rate))
        return there.seconds(Way(DENSE, "ring")) >= WORTH * there.seconds(way)

    if not pays(SLOWEST):
        return None
    if pays(FASTEST):
        return float("inf")
    low, high = SLOWEST, FASTEST
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _on_slow_links(case: Case, predictions: Sequence[Prediction]) -> Way:
    """Return the way other than dense that is fastest at a hundredth of the bandwidth."""
    there = replace(case, cluster=case.cluster.at(rate=case.cluster.rate / 100))
    return min((one.way for one in predictions[1:]), key=there.seconds)


def _worth(case: Case, way: Way, verb: str) -> list[str]:
    limit = pays_below(case, way)
    if limit is None or limit == float("inf"):
        return []
    below = show_rate(float(f"{limit:.2g}"))
    return [f"{verb} on links below about {below} ({_named(way)}), all else being equal."]


def _waiting(case: Case, one: Prediction) -> str:
    waited = max(0.0, one.seconds - case.work.seconds)
    return f"{waited / one.seconds:.0%} of it waiting for the exchange"


def _named(way: Way) -> str:
    return f"{way.spec} by {way.shown_algorithm}" if way.compresses else way.spec


def _code(way: Way, made: dict[str, Compressor], case: Case) -> str:
    if way.spec in HALVES:
        name = "fp16_compress_hook" if way.spec == FP16 else "bf16_compress_hook"
        return f"ddp.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.{name})"
    given = made[way.spec]
    options = f'compressor="{way.spec}"' if given.sparse else f'"{way.spec}"'
    if not is_auto(way, given, case.work, case.cluster):
        options += f', algorithm="{way.algorithm}"'
    if way.in_hosts:
        options += ', group=init_device_mesh("cuda", (hosts, ranks_per_host))'
    return f"optimizer = thinwire.AdamW(ddp, lr=..., {options})" if given.sparse else f"thinwire.attach(ddp, {options})"
