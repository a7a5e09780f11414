"""Choice of one compressor for a model under `compressor="auto"`, from the measured times of steps.

Dense is chosen unless the step of another compressor is clearly faster, because dense loses nothing.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from ..compressors import Compressor, NoCompression, Quantize
from ..compressors.by_ranks import default_compressor

GRADIENTS: tuple[Compressor, ...] = (NoCompression(), Quantize(bits=8))
"""Compressors that are tried for gradients, the densest first; not top-k, which ruins Adam."""
MARGIN = 1.03  # dense is kept unless its step takes longer than this factor times the fastest step


def updates(ranks: int) -> tuple[Compressor, ...]:
    """Return the compressors that are tried for the updates of thinwire's optimizers, the densest first."""
    return (*GRADIENTS, default_compressor(ranks))


class Choice(NamedTuple):
    """The compressor chosen of the specs that were tried, the seconds of their steps if measured, and the reason."""

    candidates: list[str]
    step_seconds: list[float]
    compressor: str
    reason: str

    def record(self) -> dict[str, Any]:
        return self._asdict()

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> "Choice":
        """Return the choice that `record` was made from; raise ValueError if it is none of those tried."""
        made = Choice(**{name: record[name] for name in Choice._fields})
        made.candidates.index(made.compressor)
        return made

    def describe(self) -> str:
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
    return Choice(list(specs), list(step_seconds), specs[best], reason)


def _short(spec: str) -> str:
    """Return a spec with only its bits and ratio.

    >>> _short("quantize:bits=8,block=256"), _short("topk:ratio=1/64,bits=2,chunk=4096")
    ('quantize:bits=8', 'topk:ratio=1/64,bits=2')
    """
    name, _, options = spec.partition(":")
    kept = [option for option in options.split(",") if option.partition("=")[0] in ("bits", "ratio")]
    return f"{name}:{','.join(kept)}" if kept else name
