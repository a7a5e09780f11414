"""Output of rank 0: lines of progress, and what a training came to."""

import sys
from collections.abc import Mapping
from typing import Any

PHASES = ("compute", "compress", "wait", "decode")


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def describe_step(line: Mapping[str, Any]) -> str:
    """Return the figures of a step, from its line of metrics.jsonl."""
    split = "  ".join(f"{phase} {1000 * line['split'][phase]:.1f}" for phase in PHASES)
    speed = f"{line['samples_per_second']:,.0f} samples/s"
    return f"loss {line['loss']:.4f}  {speed}  {_sent(line)}  ms: {split}"


def describe_end(name: str, end: Mapping[str, Any]) -> str:
    """Return a line about a training, from the last line of its metrics with its score."""
    score = f"validation loss {end['loss']:.4f}, accuracy {end['accuracy']:.2%}"
    return f"{name}: {end['step']:,} steps in {end['seconds']:.1f} s, {score}, {_sent(end)} by each rank"


def compare(ours: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    """Return a sentence that compares two trainings."""
    return (
        f"Compared with dense training: {reduction(ours['seconds'], dense['seconds'])} as fast, "
        f"{100 * ours['bytes_sent'] / dense['bytes_sent']:.1f} % of the bytes, "
        f"accuracy {ours['accuracy']:.1%} (dense {dense['accuracy']:.1%})."
    )


def reduction(sent: float, dense: float) -> str:
    """Return the bytes of a dense all-reduce divided by those sent, as text; empty if nothing was sent.

    >>> reduction(10, 375), reduction(10, 15), reduction(10, 10), reduction(3, 2), reduction(0, 0)
    ('38x', '1.5x', '1.0x', '0.7x', '')
    """
    if not sent or not dense:
        return ""
    return f"{dense / sent:.1f}x" if dense < 10 * sent else f"{dense / sent:.0f}x"


def _sent(line: Mapping[str, Any]) -> str:
    ratio = reduction(line["bytes_sent"], line["bytes_dense"])
    return f"{line['bytes_sent'] / 1e6:,.2f} MB sent{f' (reduction {ratio})' if ratio else ''}"
