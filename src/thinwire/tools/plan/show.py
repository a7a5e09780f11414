"""Print a case with its predictions, recommend a method, and draw the speed-up.

The recommendation is the simplest method that fits the memory and is nearly as fast as the fastest. Local steps stand
before it only where sending every step is hopeless (`local`).
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from thinwire.compressors import Compressor
from thinwire.tools.units import SLOWEST, format_bytes, format_count, format_number, format_rate, format_seconds

from .local import advise_local, boundary, pays_from, predict_local, print_local
from .methods import BF16, DENSE, FP16, HALVES, Method, methods_for
from .model import Case, Prediction
from .shared import print_table

WORTH = 1.05
"""Smallest speed-up that justifies a less simple method: compression costs memory, and the loss must be checked."""
_FASTEST = 1e13


def show(case: Case, made: dict[str, Compressor], plot: Path | None) -> None:
    """Print the case, the table of predictions and the recommendation, and draw the plot if there is a path."""
    predictions = [case.best(method) for method in _methods(case, made)]
    work, cluster = case.work, case.cluster
    whose, peers = "", f"{cluster.world:,} ranks"
    if case.shard > 1:
        whose, peers = " of a rank", f"{cluster.world:,} replicas of {case.shard:,} ranks"
    link = "sharing a half-duplex channel" if cluster.is_shared else "each with a link"
    print(
        f"{format_count(work.numel)} parameters{whose} in {len(work.buckets):,} bucket(s) of "
        f"{str(work.dtype).removeprefix('torch.')}; {peers}, {link} of {format_rate(cluster.rate)}, latency "
        f"{format_seconds(cluster.latency)}"
    )
    print(
        f"a step without communication: {format_seconds(work.seconds, 3)}, {format_seconds(work.backward, 3)} of it "
        f"backward ({case.origin})"
    )
    codecs = case.speeds.codecs
    rates = (f"{spec} {format_count(1 / (codecs[c].encode + codecs[c].commit))}" for spec, c in made.items())
    print(f"codec: {case.speeds.origin}; elements compressed per second: {', '.join(rates)}")
    dense = predictions[0].seconds
    lines = [
        {
            "method": one.method.name,
            "algorithm": one.algorithm,
            "step": format_seconds(one.seconds),
            "speed-up": f"{format_number(dense / one.seconds)}x",
            "limited by": case.limited_by(one.method),
            "sent": format_bytes(one.sent),
            "messages": format_number(one.messages),
            "residual": format_bytes(one.residual),
            "buffers": format_bytes(one.buffers),
            "": ", ".join(["DDP only"] * one.is_ddp_only + ["does not fit"] * (not one.fits)),
        }
        for one in predictions
    ]
    print_table("Predicted for one step of a rank", lines, text=("method", "algorithm", "limited by", ""))
    local = predict_local(case, made)
    print_local(local, dense)
    for line in (
        *advise_local(case, predictions, local),
        *advise(case, predictions),
        *pays_from(case, predictions, made),
    ):
        print(line)
    if plot is not None:
        draw(case, made, plot)
        print(f"{plot}: speed-up against bandwidth and world size")


def advise(case: Case, predictions: Sequence[Prediction]) -> list[str]:
    """Return the recommendation as lines of text; the first line is the essence."""
    dense, chosen = predictions[0], choose(predictions)
    if chosen is None:
        memory, need = case.cluster.memory, case.training_bytes(dense.method) * case.shard
        room = "" if memory is None else f"of {format_bytes(memory, 3)} "
        shards = 1 << (ceil(need / memory) - 1).bit_length() if memory else 1
        return [
            f"No method fits the memory {room}of a rank, not even dense, which needs {format_bytes(need)} for a "
            f"replica: shard it over {shards:,} ranks or more (fully_shard, docs/fsdp.md; --shard {shards}), or use "
            "larger ranks."
        ]
    possible = [one for one in predictions if one.is_usable]
    best = min(possible, key=lambda one: one.seconds)
    waiting = f"{max(0.0, 1 - case.work.seconds / dense.seconds):.0%} of it waiting for the exchange"
    if chosen.method.name == DENSE:
        others = min((one for one in predictions[1:] if one.is_usable or not one.fits), key=lambda one: one.seconds)
        slow = case.at(rate=case.cluster.rate / 100)
        best_there = min((one.method for one in possible[1:]), key=slow.seconds, default=None)
        unfit = "" if others.fits else ", which does not fit the memory: it would if the model were sharded"
        return [
            f"Do not compress: a dense step takes {format_seconds(dense.seconds)}, {waiting}; the fastest other method "
            f"({_named(others)}) takes {format_seconds(others.seconds)}{unfit}.",
            *([] if best_there is None else _limit(case, best_there, "Compression would pay")),
        ]
    lines = [
        f"Use {_named(chosen)}: {format_seconds(chosen.seconds)} per step, "
        f"{format_number(dense.seconds / chosen.seconds)}x the speed of dense ({format_seconds(dense.seconds)}, "
        f"{waiting}); it sends {format_bytes(chosen.sent)} in place of {format_bytes(dense.sent)}, and takes "
        f"{format_bytes(chosen.residual + chosen.buffers)} of memory.",
        f"    {_code(chosen.method, case.shard > 1)}",
        *_limit(case, chosen.method, "It pays"),
    ]
    if best.method != chosen.method and (gain := chosen.seconds / best.seconds - 1) >= 0.001:
        more = format_number(100 * gain)
        lines.append(f"{_named(best)} would be {more}% faster still, which does not justify the extra complexity.")
    if chosen.method.compressor is not None:
        lines.append("What it does to the loss is not predicted: docs/training.md says what was measured.")
    return lines


def choose(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the simplest usable method that takes at most `WORTH` times as long as the fastest usable one.

    From simple to complex, the methods are: dense, bf16, fp16 (whose values may overflow), compressors that send every
    element, sparse compressors. Among equally simple ones, the first wins. None if no method is usable.
    """
    possible = [one for one in predictions if one.is_usable]
    if not possible:
        return None
    best = min(one.seconds for one in possible)

    def complexity(one: Prediction) -> int:
        given = one.method.compressor
        return (DENSE, BF16, FP16).index(one.method.name) if given is None else 4 if given.sparse else 3

    return min((one for one in possible if one.seconds <= WORTH * best), key=complexity)


def pays_below(case: Case, method: Method) -> float | None:
    """Return the bandwidth, in bits per second, up to which a method is faster than dense by the factor `WORTH`.

    Return None if it is not faster even on the slowest link, or is faster even on the fastest.
    """

    def pays(rate: float) -> bool:
        there = case.at(rate=rate)
        return there.seconds(Method(DENSE)) >= WORTH * there.seconds(method)

    return boundary(pays, SLOWEST, _FASTEST) if pays(SLOWEST) and not pays(_FASTEST) else None


def _limit(case: Case, method: Method, verb: str) -> list[str]:
    limit = pays_below(case, method)
    if limit is None:
        return []
    return [f"{verb} on links below about {format_rate(float(f'{limit:.2g}'))} ({method.name}), all else being equal."]


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
    by = "" if method.given == "auto" else f', algorithm="{method.given}"'
    if kind == "attach":
        return f'thinwire.attach({model}, "{spec}"{group}{by})'
    return f'optimizer = {kind}({model}, lr=..., compressor="{spec}"{group}{by})'


def _methods(case: Case, made: dict[str, Compressor]) -> list[Method]:
    return methods_for(made, nccl=case.cluster.nccl, dtype=case.work.dtype)


def draw(case: Case, made: dict[str, Compressor], path: Path) -> None:
    """Draw the speed-up of each method over dense, against bandwidth and against world size."""
    from matplotlib.figure import Figure  # here, because only --plot needs it

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    rates, worlds = [10 ** (7 + step / 8) for step in range(33)], [2**power for power in range(1, 13)]
    cluster, methods = case.cluster, _methods(case, made)
    panels = (
        ("bandwidth of a link, bit/s", rates, [case.at(rate=rate) for rate in rates], cluster.rate),
        ("ranks", worlds, [case.at(world=world) for world in worlds], cluster.world),
    )
    for axes, (label, places, cases, here) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        dense = [one.seconds(methods[0]) for one in cases]
        for method in methods[1:]:
            speedups = [base / one.seconds(method) for base, one in zip(dense, cases, strict=True)]
            axes.plot(places, speedups, label=method.name)
        axes.axhline(1, color="grey", linestyle="dashed")
        axes.axvline(here, color="grey", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="speed-up over dense")
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(
        f"Predicted: {case.work.numel:,} parameters, {cluster.world:,} ranks, {format_rate(cluster.rate)}, "
        f"{format_seconds(case.work.seconds)} per step without communication"
    )
    figure.savefig(path)
