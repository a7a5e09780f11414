"""Choice of a compressor for each bucket under `compressor="auto"`, from measured times.

This module is pure: it reads no clock and does not communicate. `trials.py` measures.

Dense is chosen unless another compressor is clearly faster, because dense loses nothing. Otherwise all buckets start
with the compressor of the fastest step. Each bucket then gets a denser compressor if that costs no time, for example
because the backward pass hides its exchange. The cost is read from a timeline in which buckets hold the link one after
the other:

    end of a bucket = max(time its gradients are ready, end of the previous bucket) + time it holds the link

So the cost of a dense bucket includes the delay of the buckets after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite
from typing import Any

from ..compressors import Compressor, NoCompression, Quantize
from ..compressors import compressor as parsed
from .policy import default_compressor

GRADIENTS: tuple[Compressor, ...] = (NoCompression(), Quantize(bits=8))
"""Compressors that are tried for gradients, the densest first.

Top-k is not among them, because it ruins Adam, and the optimizer is not known here.
"""

MARGIN = 1.03
"""Dense is kept unless its step takes longer than this factor times the fastest step."""
_TIE = 0.01
"""Share of the fastest step's time that denser compressors may add to the step."""


def updates(ranks: int) -> tuple[Compressor, ...]:
    """Return the compressors that are tried for the updates of thinwire's optimizers, the densest first."""
    return (*GRADIENTS, default_compressor(ranks))


@dataclass(frozen=True)
class BucketTimes:
    """Times of one bucket, averaged over ranks; NaN where nothing was measured."""

    names: tuple[str, ...]
    ready: float
    """Seconds from the gradients of the first bucket to those of this bucket."""
    held: tuple[float, ...]
    """Seconds for which the bucket held the link, for each compressor.

    The time in which the link was busy is divided among the buckets by their bytes.
    """


@dataclass(frozen=True)
class Measured:
    """Measurements averaged over ranks, so that all ranks decide alike."""

    specs: tuple[str, ...]
    """Specs of the compressors that were tried, the densest first, which is "none"."""
    step_seconds: tuple[float, ...]
    """Seconds of a whole step in which all buckets use the same compressor, for each compressor."""
    buckets: tuple[BucketTimes, ...]
    """Times of the buckets, in the order in which they are sent."""

    def record(self) -> dict[str, Any]:
        """Return the measurements as a dict, for checkpoints."""
        buckets = [[list(one.names), one.ready, list(one.held)] for one in self.buckets]
        return {"candidates": list(self.specs), "step_seconds": list(self.step_seconds), "buckets": buckets}

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> "Measured":
        """Return the measurements that `record` was made from."""
        buckets = tuple(BucketTimes(tuple(names), ready, tuple(held)) for names, ready, held in record["buckets"])
        return Measured(tuple(record["candidates"]), tuple(record["step_seconds"]), buckets)


@dataclass(frozen=True)
class BucketChoice:
    """The compressor chosen for one bucket, and the reason."""

    names: tuple[str, ...]
    compressor: str
    reason: str
    held: tuple[float, ...]
    """Seconds for which the bucket held the link, for each compressor."""


@dataclass(frozen=True)
class Choice:
    """The measurements, the choice made from them, and its reason."""

    specs: tuple[str, ...]
    step_seconds: tuple[float, ...]
    reason: str
    buckets: tuple[BucketChoice, ...]

    @cached_property
    def compressors(self) -> dict[str, Compressor]:
        """Return the chosen compressor of each parameter."""
        return {name: parsed(bucket.compressor) for bucket in self.buckets for name in bucket.names}

    @property
    def is_mixed(self) -> bool:
        """Return whether the buckets have different compressors."""
        return len({bucket.compressor for bucket in self.buckets}) > 1

    def record(self) -> dict[str, Any]:
        """Return the choice as a dict, for JSON and checkpoints."""
        made: dict[str, Any] = asdict(self)
        buckets = [{**one, "names": list(one["names"])} for one in made["buckets"]]
        return {"candidates": made.pop("specs"), **made, "buckets": buckets}  # the name that files have

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> "Choice":
        """Return the choice that `record` was made from."""
        buckets = (
            BucketChoice(tuple(one["names"]), one["compressor"], one["reason"], tuple(one["held"]))
            for one in record["buckets"]
        )
        return Choice(tuple(record["candidates"]), tuple(record["step_seconds"]), record["reason"], tuple(buckets))

    def describe(self) -> str:
        """Return the choice as text."""
        lines = [f"auto: {self.reason}"]
        for number, bucket in enumerate(self.buckets, 1):
            held = ", ".join(f"{_short(spec)} {_ms(s)}" for spec, s in zip(self.specs, bucket.held, strict=True))
            lines.append(
                f"  bucket {number} ({len(bucket.names)} parameters from {bucket.names[0]}): "
                f"{_short(bucket.compressor)}, {bucket.reason}; it held the link for {held}"
            )
        return "\n".join(lines)


def decide(measured: Measured) -> Choice:
    """Return the compressor of each bucket, chosen from these measurements.

    >>> one = BucketTimes(("weight",), 0.0, (2.0, 0.5))
    >>> decide(Measured(("none", "quantize:bits=8"), (2.5, 1.0), (one,))).buckets[0].compressor
    'quantize:bits=8'
    >>> decide(Measured(("none", "quantize:bits=8"), (1.02, 1.0), (one,))).buckets[0].compressor
    'none'
    """
    seconds = measured.step_seconds
    times = ", ".join(f"{_short(spec)} {_ms(s)}" for spec, s in zip(measured.specs, seconds, strict=True))
    if not all(isfinite(one) and one > 0 for one in seconds):
        return uniform(measured, 0, f"nothing is compressed, because not every compressor could be measured ({times})")
    best = min(range(len(seconds)), key=seconds.__getitem__)  # the densest one if several are equal
    if seconds[0] <= MARGIN * seconds[best]:
        return uniform(measured, 0, f"nothing is compressed, because no step is clearly faster than dense ({times})")
    fastest = f"{_short(measured.specs[best])} has the fastest step ({times})"
    chosen = [best] * len(measured.buckets)
    if any(not isfinite(one) for bucket in measured.buckets for one in (bucket.ready, *bucket.held)):
        return uniform(measured, best, fastest)
    limit = _end(measured.buckets, chosen) + _TIE * seconds[best]
    for number in range(len(chosen)):
        for denser in range(best):
            tried = [*chosen[:number], denser, *chosen[number + 1 :]]
            if _end(measured.buckets, tried) <= limit:
                chosen = tried
                break
    if best not in chosen:  # the timeline does not explain why it was faster, so it cannot be used
        return uniform(measured, best, fastest)
    reasons = ["as in the fastest step" if one == best else "denser at no cost in time" for one in chosen]
    return _choice(measured, fastest, chosen, reasons)


def uniform(measured: Measured, index: int, reason: str) -> Choice:
    """Return a choice that gives all buckets the same compressor."""
    count = len(measured.buckets)
    return _choice(measured, reason, [index] * count, ["the same for all buckets"] * count)


def confirm(mixed: Choice, measured: Measured, mixed_seconds: float) -> Choice:
    """Return the mixture, or the fastest single compressor if a trial showed the mixture to be slower.

    The mixture was chosen by a timeline, and `mixed_seconds` is the measured time of its step. It is kept if that is at
    most `MARGIN` times the time of the fastest compressor.
    """
    best = min(range(len(measured.specs)), key=measured.step_seconds.__getitem__)
    alone = measured.step_seconds[best]
    if mixed_seconds <= MARGIN * alone:
        return mixed
    why = f"a mixture was tried, and its step took {_ms(mixed_seconds)}"
    return uniform(measured, best, f"{mixed.reason}; {why}")


def _choice(measured: Measured, reason: str, chosen: Sequence[int], reasons: Sequence[str]) -> Choice:
    buckets = (
        BucketChoice(times.names, measured.specs[index], why, times.held)
        for times, index, why in zip(measured.buckets, chosen, reasons, strict=True)
    )
    return Choice(measured.specs, measured.step_seconds, reason, tuple(buckets))


def _end(buckets: Sequence[BucketTimes], chosen: Sequence[int]) -> float:
    end = 0.0
    for bucket, index in zip(buckets, chosen, strict=True):
        end = max(end, bucket.ready) + bucket.held[index]
    return end


def _short(spec: str) -> str:
    """Return a spec with only its bits and ratio.

    >>> _short("quantize:bits=8,block=256"), _short("topk:ratio=1/64,bits=2,chunk=4096")
    ('quantize:bits=8', 'topk:ratio=1/64,bits=2')
    """
    name, _, options = spec.partition(":")
    kept = [option for option in options.split(",") if option.partition("=")[0] in ("bits", "ratio")]
    return f"{name}:{','.join(kept)}" if kept else name


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
