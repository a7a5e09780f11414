"""Print a case with its predictions, and recommend a method.

The recommendation is the simplest method that fits the memory and is nearly as fast as the fastest. Local steps stand
before it only where sending every step is hopeless (`local`).
"""

from collections.abc import Mapping, Sequence
from math import ceil

from thinwire.compressors import Compressor
from thinwire.tools.units import SLOWEST, format_bytes, format_count, format_number, format_rate, format_seconds

from .local import advise_local
from .methods import DENSE, FP16, HALVES, Method, methods_for
from .model import Case, Prediction

WORTH = 1.05
"""Smallest speed-up that justifies a less simple method: compression costs memory, and the loss must be checked."""
_FASTEST = 1e13
_TEXT = ("method", "algorithm", "limited by", "")  # Columns that are left-aligned


def show(case: Case, made: Mapping[str, Compressor]) -> None:
    """Print the case, the table of predictions and the recommendation."""
    cluster, codecs = case.cluster, case.speeds.codecs
    is_sharded = case.shard > 1
    print(
        f"{format_count(case.numel)} parameters{' of a rank' * is_sharded} in {len(case.buckets):,} bucket(s) of "
        f"{str(case.dtype).removeprefix('torch.')}; {cluster.world:,} "
        f"{f'replicas of {case.shard:,} ranks' if is_sharded else 'ranks'}, each with a link of "
        f"{format_rate(cluster.rate)}, latency {format_seconds(cluster.latency)}"
    )
    print(f"a step without communication: {format_seconds(case.compute, 3)}, two thirds of it backward")
    rates = (f"{spec} {format_count(1 / (codecs[c].encode + codecs[c].commit))}" for spec, c in made.items())
    print(f"codec: as measured on {case.speeds.origin}; elements compressed per second: {', '.join(rates)}")
    predictions = [case.predict(method) for method in methods_for(made, cluster, case.dtype, case.shard)]
    _print_table(case, predictions)
    print("\n".join([*advise_local(case, predictions, made), *advise(case, predictions)]))


def _print_table(case: Case, predictions: Sequence[Prediction]) -> None:
    rows = [
        {
            "method": one.method.name,
            "algorithm": one.algorithm,
            "step": format_seconds(one.seconds),
            "speed-up": f"{format_number(predictions[0].seconds / one.seconds)}x",
            "limited by": case.limited_by(one.method),
            "sent": format_bytes(one.sent),
            "messages": format_number(one.messages),
            "residual": format_bytes(one.residual),
            "buffers": format_bytes(one.buffers),
            "": "" if one.fits else "does not fit",
        }
        for one in predictions
    ]
    widths = {header: max(len(header), *(len(row[header]) for row in rows)) for header in rows[0]}
    print("\nPredicted for one step of a rank")
    for row in ({header: header for header in widths}, {header: "-" * widths[header] for header in widths}, *rows):
        cells = (f"{row[name]:{'<' if name in _TEXT else '>'}{width}}" for name, width in widths.items())
        print("  ".join(cells).rstrip())


def advise(case: Case, predictions: Sequence[Prediction]) -> list[str]:
    """Return the recommendation as lines of text; the first line is the essence."""
    dense, chosen = predictions[0], choose(predictions)
    if chosen is None:
        need = case.training_bytes(dense.method) * case.shard
        shards = 1 << (ceil(need / (case.memory or need)) - 1).bit_length()
        return [
            f"No method fits the memory of a rank, not even dense, which needs {format_bytes(need)} for a replica: "
            f"shard it over {shards:,} ranks or more (fully_shard, docs/fsdp.md; --shard {shards})."
        ]
    waiting = f"{max(0.0, 1 - case.compute / dense.seconds):.0%} of it waiting for the exchange"
    if chosen is dense:
        other = min(predictions[1:], key=lambda one: one.seconds)
        slow = case.at(rate=case.cluster.rate / 100)
        first = min((one.method for one in predictions[1:] if one.fits), key=slow.seconds, default=other.method)
        unfit = "" if other.fits else ", which does not fit the memory: it would if the model were sharded"
        return [
            f"Do not compress: a dense step takes {format_seconds(dense.seconds)}, {waiting}; the fastest other method "
            f"({_named(other)}) takes {format_seconds(other.seconds)}{unfit}.",
            *limit(case, first, "Compression would pay"),
        ]
    best = min((one for one in predictions if one.fits), key=lambda one: one.seconds)
    lines = [
        f"Use {_named(chosen)}: {format_seconds(chosen.seconds)} per step, "
        f"{format_number(dense.seconds / chosen.seconds)}x the speed of dense ({format_seconds(dense.seconds)}, "
        f"{waiting}); it sends {format_bytes(chosen.sent)} in place of {format_bytes(dense.sent)}.",
        f"    {_code(chosen.method, case.shard > 1)}",
        *limit(case, chosen.method, "It pays"),
    ]
    if best.method != chosen.method and (gain := chosen.seconds / best.seconds - 1) >= 0.001:
        more = format_number(100 * gain)
        lines.append(f"{_named(best)} would be {more}% faster still, which does not justify the extra complexity.")
    if chosen.method.compressor is not None:
        memory = format_bytes(chosen.residual + chosen.buffers)
        lines.append(f"It takes {memory} of memory. Its loss is not predicted: see docs/training.md.")
    return lines


def choose(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the first method that fits and takes at most `WORTH` times as long as the fastest one that fits.

    Predictions are in the order of `methods_for`, the simplest method first. Return None if no method fits.
    """
    possible = [one for one in predictions if one.fits]
    best = min((one.seconds for one in possible), default=0.0)
    return next((one for one in possible if one.seconds <= WORTH * best), None)


def limit(case: Case, method: Method, verb: str) -> list[str]:
    """Return up to which bandwidth a method is faster than dense by the factor `WORTH`, as a line of text.

    Return nothing if it is not faster even on the slowest link, or is faster even on the fastest.
    """

    def pays(rate: float) -> bool:
        there = case.at(rate=rate)
        return there.seconds(Method(DENSE)) >= WORTH * there.seconds(method)

    slow, fast = SLOWEST, _FASTEST
    if not pays(slow) or pays(fast):
        return []
    while fast > 1.01 * slow:
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if pays(middle) else (slow, middle)
    return [f"{verb} on links below about {format_rate(float(f'{slow:.2g}'))} ({method.name}), all else being equal."]


def _named(one: Prediction) -> str:
    return one.method.name if one.method.compressor is None else f"{one.method.name} ({one.algorithm})"


def _code(method: Method, is_sharded: bool) -> str:
    if method.name in HALVES and is_sharded:
        return "fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
    model, group = ("model", ', group=mesh["replicate"]') if is_sharded else ("ddp", "")
    if method.name in HALVES:
        name = "fp16_compress_hook" if method.name == FP16 else "bf16_compress_hook"
        return f"ddp.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.{name})"
    kind, _, spec = method.name.partition(" ")
    if kind == "attach":
        return f'thinwire.attach({model}, "{spec}"{group})'
    return f'optimizer = {kind}({model}, lr=..., compressor="{spec}"{group})'
