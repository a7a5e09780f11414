"""`compressor="auto"`: which compressor each bucket gets, from what was measured. Pure: no clock, no ranks.

Dense is chosen unless something is clearly quicker, because dense loses nothing. Otherwise all buckets begin with the
candidate of the quickest step, and each gets a denser one if that costs no time, as where its exchange is hidden behind
the backward pass. What it costs is read off a timeline: buckets hold the link one after the other,

    end of a bucket = max(when its gradients are there, end of the bucket before) + how long it holds the link

so a dense bucket that hides itself, but delays the one behind it, is seen to cost. `trials.py` measures.
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
"""What gradients may be sent by, the densest first. No top-k: it ruins Adam, and nobody here knows the optimizer."""

MARGIN = 1.03
"""Dense is kept if the quickest step is not quicker than this."""
_TIE = 0.01
"""Of a step: a bucket gets a denser compressor if the step is not longer by more."""


def updates(ranks: int) -> tuple[Compressor, ...]:
    """Return what the updates of thinwire's optimizers may be sent by, the densest first."""
    return (*GRADIENTS, default_compressor(ranks))


@dataclass(frozen=True)
class BucketTimes:
    """Means over ranks; NaN where there was no measuring."""

    names: tuple[str, ...]
    ready: float
    """When its gradients are there, in seconds after those of the first bucket."""
    held: tuple[float, ...]
    """Seconds for which it held the link, by candidate: its share, by bytes, of the time that the link was held."""


@dataclass(frozen=True)
class Measured:
    """Means over ranks, so that all ranks decide alike."""

    candidates: tuple[str, ...]
    """Specs, the densest, which is "none", first."""
    step_seconds: tuple[float, ...]
    """Of a whole step, when all buckets are sent by one candidate."""
    buckets: tuple[BucketTimes, ...]
    """In the order in which they are sent."""


@dataclass(frozen=True)
class BucketChoice:
    names: tuple[str, ...]
    compressor: str
    reason: str
    held: tuple[float, ...]
    """Seconds for which it held the link, by candidate."""


@dataclass(frozen=True)
class Choice:
    """What was measured, what was chosen, and why."""

    candidates: tuple[str, ...]
    step_seconds: tuple[float, ...]
    reason: str
    buckets: tuple[BucketChoice, ...]

    @cached_property
    def compressors(self) -> dict[str, Compressor]:
        """By parameter."""
        return {name: parsed(bucket.compressor) for bucket in self.buckets for name in bucket.names}

    @property
    def is_mixed(self) -> bool:
        return len({bucket.compressor for bucket in self.buckets}) > 1

    def record(self) -> dict[str, Any]:
        """For JSON and checkpoints."""
        made: dict[str, Any] = asdict(self)
        return {**made, "buckets": [{**one, "names": list(one["names"])} for one in made["buckets"]]}

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> "Choice":
        buckets = (
            BucketChoice(tuple(one["names"]), one["compressor"], one["reason"], tuple(one["held"]))
            for one in record["buckets"]
        )
        return Choice(tuple(record["candidates"]), tuple(record["step_seconds"]), record["reason"], tuple(buckets))

    def describe(self) -> str:
        """For people."""
        lines = [f"auto: {self.reason}"]
        for number, bucket in enumerate(self.buckets, 1):
            held = ", ".join(f"{_short(spec)} {_ms(s)}" for spec, s in zip(self.candidates, bucket.held, strict=True))
            lines.append(
                f"  bucket {number} ({len(bucket.names)} parameters from {bucket.names[0]}): "
                f"{_short(bucket.compressor)}, {bucket.reason}; it held the link for {held}"
            )
        return "\n".join(lines)


def decide(measured: Measured) -> Choice:
    """
    >>> one = BucketTimes(("weight",), 0.0, (2.0, 0.5))
    >>> decide(Measured(("none", "quantize:bits=8"), (2.5, 1.0), (one,))).buckets[0].compressor
    'quantize:bits=8'
    >>> decide(Measured(("none", "quantize:bits=8"), (1.02, 1.0), (one,))).buckets[0].compressor
    'none'
    """
    seconds = measured.step_seconds
    told = ", ".join(f"{_short(spec)} {_ms(s)}" for spec, s in zip(measured.candidates, seconds, strict=True))
    if not all(isfinite(one) and one > 0 for one in seconds):
        return uniform(measured, 0, f"nothing is compressed, because not every candidate could be measured ({told})")
    best = min(range(len(seconds)), key=seconds.__getitem__)  # the densest of equals
    if seconds[0] <= MARGIN * seconds[best]:
        return uniform(measured, 0, f"nothing is compressed, because no step is clearly quicker than dense ({told})")
    quickest = f"{_short(measured.candidates[best])} has the quickest step ({told})"
    chosen = [best] * len(measured.buckets)
    if any(not isfinite(one) for bucket in measured.buckets for one in (bucket.ready, *bucket.held)):
        return uniform(measured, best, quickest)
    limit = _end(measured.buckets, chosen) + _TIE * seconds[best]
    for number in range(len(chosen)):
        for denser in range(best):
            tried = [*chosen[:number], denser, *chosen[number + 1 :]]
            if _end(measured.buckets, tried) <= limit:
                chosen = tried
                break
    if best not in chosen:  # the link does not explain why it was quicker, so the link cannot say who may be denser
        return uniform(measured, best, quickest)
    reasons = ["as in the quickest step" if one == best else "which costs the step no time" for one in chosen]
    return _choice(measured, chosen, quickest, reasons)


def uniform(measured: Measured, candidate: int, reason: str) -> Choice:
    """The same for all buckets."""
    count = len(measured.buckets)
    return _choice(measured, [candidate] * count, reason, ["as all others"] * count)


def confirm(mixed: Choice, measured: Measured, mixed_seconds: float) -> Choice:
    """A mixture rests on a timeline; this is after it has been tried. Kept unless its steps are longer than without."""
    best = min(range(len(measured.candidates)), key=measured.step_seconds.__getitem__)
    alone = measured.step_seconds[best]
    if mixed_seconds <= MARGIN * alone:
        return mixed
    why = f"a mixture was tried, and its step took {_ms(mixed_seconds)}"
    return uniform(measured, best, f"{mixed.reason}; {why}")


def _choice(measured: Measured, chosen: Sequence[int], reason: str, reasons: Sequence[str]) -> Choice:
    buckets = (
        BucketChoice(times.names, measured.candidates[index], why, times.held)
        for times, index, why in zip(measured.buckets, chosen, reasons, strict=True)
    )
    return Choice(measured.candidates, measured.step_seconds, reason, tuple(buckets))


def _end(buckets: Sequence[BucketTimes], chosen: Sequence[int]) -> float:
    end = 0.0
    for bucket, index in zip(buckets, chosen, strict=True):
        end = max(end, bucket.ready) + bucket.held[index]
    return end


def _short(spec: str) -> str:
    """
    >>> _short("quantize:bits=8,block=256,rounding=nearest,seed=0"), _short("topk:ratio=1/64,bits=2,chunk=4096")
    ('quantize:bits=8', 'topk:ratio=1/64,bits=2')
    """
    name, _, options = spec.partition(":")
    kept = [option for option in options.split(",") if option.partition("=")[0] in ("bits", "ratio")]
    return f"{name}:{','.join(kept)}" if kept else name


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
