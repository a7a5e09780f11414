"""Writes Markdown tables of loss or accuracy and bytes by method, with the conditions and the command."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .losses import Comparison, Method, Result
from .markdown import short


def section(comparisons: Sequence[Comparison], command: str, plot: str, seen: Callable[[Path], str]) -> str:
    """Return the plot, the tables and their captions as Markdown.

    `plot` is the link to the plot, or empty. `seen` returns the link to a file.
    """
    parts = [f"![Validation loss over bytes that a rank sends, for every method]({plot})"] if plot else []
    for one in comparisons:
        parts += [_title(one), table(one), _made(one, [seen(file) for file in one.files])]
    written = "Tables and plot are" if plot else "Tables are"
    return "\n\n".join([*parts, f"{written} written by `{command}`."])


def table(one: Comparison) -> str:
    """Return a table with a line for each method, a column for each world size and learning rate, and the reduction."""
    heads = ["", *(f"{ranks} ranks, lr {lr:g}" for ranks, lr in one.columns), "seeds"]
    heads += [f"reduction, {ranks} ranks" for ranks in one.worlds]
    lines = [heads, ["---"] * len(heads)]
    for method in one.methods:
        results = [one.results.get((method, *column)) for column in one.columns]
        cells = [_cell(one, method, lr, result) for (_, lr), result in zip(one.columns, results, strict=True)]
        counts = sorted({result.seeds for result in results if result})
        seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        title = f"**{one.title(method)}**" if method.is_ours else one.title(method)
        lines.append([title, *cells, seeds, *(_reduction(one, method, ranks) for ranks in one.worlds)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(one: Comparison, method: Method, lr: float, result: Result | None) -> str:
    if result is None:
        return ""
    if not math.isfinite(result.value):
        return "diverged"
    text = one.metric.show(result.value)
    if method.is_dense:
        return text
    same, best = one.dense(lr), one.dense()
    assert best
    compared = [one.metric.difference(result.value, dense[2].value) if dense else "-" for dense in (same, best)]
    return f"{text} ({' / '.join(compared)})"


def _reduction(one: Comparison, method: Method, ranks: int) -> str:
    """Return the mean reduction over learning rates. The bytes of few methods depend on the learning rate."""
    found = [result.reduction for (name, size, _), result in one.results.items() if (name, size) == (method, ranks)]
    return f"{short(sum(found) / len(found))}x" if found else ""


def _data(given: dict[str, Any]) -> str:
    return f" on {given['data']}" if "data" in given else ""


def _title(one: Comparison) -> str:
    given, best = one.conditions, one.dense()
    assert best
    unit = "" if one.metric.name == "validation loss" else ", in percentage points,"
    dense = "; ".join(part for part in (best[0].options, f"lr {best[1]:g}") if part)
    totals = {ranks: result.dense_total for (_, ranks, _), result in one.results.items()}
    sent = ", ".join(f"{totals[ranks] / 1e6:,.0f} MB with {ranks} ranks" for ranks in one.worlds)
    return (
        f"{one.model}{_data(given)}, {given['parameters'] / 1e6:.3g} M parameters, {one.family}, "
        f"{given['steps']:,} steps of {one.samples} samples: {one.metric.name}, the mean over seeds. In brackets the "
        f"difference{unit} to the best dense with the same learning rate / to the best dense of all "
        f"({one.metric.show(best[2].value)}: {dense}); `-`: there is none. "
        f"Reduction: bytes that a rank sends in all steps, warm-up included, against a dense ring "
        f"all-reduce ({sent})."
    )


def _made(one: Comparison, files: Sequence[str]) -> str:
    return f"{'; '.join(one.origins)}. Rows: {', '.join(f'[{file}]({file})' for file in files)}."
