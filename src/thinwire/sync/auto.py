"""Choice of one compressor for a model under `compressor="auto"`, from the measured times of steps.

This module is pure: it reads no clock and does not communicate. `trials.py` measures.

Dense is chosen unless the step of another compressor is clearly faster, because dense loses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ..compressors import Compressor, NoCompression, Quantize
from .policy import default_compressor

GRADIENTS: tuple[Compressor, ...] = (NoCompression(), Quantize(bits=8))
"""Compressors that are tried for gradients, the densest first.

Top-k is not among them, because it ruins Adam, and the optimizer is not known here.
"""

MARGIN = 1.03
"""Dense is kept unless its step takes longer than this factor times the fastest step."""


def updates(ranks: int) -> tuple[Compressor, ...]:
    """Return the compressors that are tried for the updates of thinwire's optimizers, the densest first."""
    return (*GRADIENTS, default_compressor(ranks))


@dataclass(frozen=True)
class Choice:
    """The compressor chosen for all steps, the measurements, and the reason."""

    specs: tuple[str, ...]
    """Specs of the compressors that were tried, the densest first, which is "none"."""
    step_seconds: tuple[float, ...]
    """Seconds of a step with each compressor, averaged over ranks; empty if nothing was measured."""
    compressor: str
    reason: str

    @property
    def index(self) -> int:
        """Return the number of the chosen compressor; 0 is dense."""
        return self.specs.index(self.compressor)

    def record(self) -> dict[str, Any]:
        """Return the choice as a dict, for JSON and checkpoints."""
        return {
            "candidates": list(self.specs),
            "step_seconds": list(self.step_seconds),
            "compressor": self.compressor,
            "reason": self.reason,
        }

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> "Choice":
        """Return the choice that `record` was made from; raise ValueError if it is none of those tried."""
        specs = tuple(record["candidates"])
        if record["compressor"] not in specs:
            raise ValueError(f"a choice of {record['compressor']!r}, expected one of {', '.join(map(str, specs))}")
        return Choice(specs, tuple(record["step_seconds"]), record["compressor"], record["reason"])

    def describe(self) -> str:
        """Return the choice as text."""
        return f"auto: {self.reason}"


def decide(specs: Sequence[str], step_seconds: Sequence[float]) -> Choice:
    """Return the choice of one of these compressors, by the seconds of their steps.

    >>> [decide(("none", "quantize:bits=8"), (dense, 1.0)).compressor for dense in (2.5, 1.02)]
    ['quantize:bits=8', 'none']
    """
    times = ", ".join(f"{_short(spec)} {1e3 * s:,.1f} ms" for spec, s in zip(specs, step_seconds, strict=True))
    best = min(range(len(specs)), key=step_seconds.__getitem__)  # the densest one if several are equal
    if not all(isfinite(one) and one > 0 for one in step_seconds):
        best, reason = 0, f"nothing is compressed, because not every compressor could be measured ({times})"
    elif step_seconds[0] <= MARGIN * step_seconds[best]:
        best, reason = 0, f"nothing is compressed, because no step is clearly faster than dense ({times})"
    else:
        reason = f"{_short(specs[best])} has the fastest step ({times})"
    return Choice(tuple(specs), tuple(step_seconds), specs[best], reason)


def _short(spec: str) -> str:
    """Return a spec with only its bits and ratio.

    >>> _short("quantize:bits=8,block=256,rounding=nearest,seed=0"), _short("topk:ratio=1/64,bits=2,chunk=4096")
    ('quantize:bits=8', 'topk:ratio=1/64,bits=2')
    """
    name, _, options = spec.partition(":")
    kept = [option for option in options.split(",") if option.partition("=")[0] in ("bits", "ratio")]
    return f"{name}:{','.join(kept)}" if kept else name
