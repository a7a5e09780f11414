"""Prints the rows as a table: one line for each recipe, with the mean over its seeds."""

import math
from collections.abc import Sequence

from thinwire.tools.bench.tables import print_table

from .measured import Row
from .settings import Settings


def print_rows(settings: Settings, rows: Sequence[Row]) -> None:
    """Print the table and the explanation of its columns."""
    by_recipe: dict[str, list[Row]] = {}
    for row in rows:
        by_recipe.setdefault(row.case.recipe.text, []).append(row)
    dense = {
        group[0].case.recipe.recipe.family: _mean([row.loss for row in group])
        for text, group in by_recipe.items()
        if text.endswith(" dense")
    }
    kind = "threads of one process" if settings.simulate else "processes"
    print_table(
        f"{type(settings.build(0)).__name__}, {settings.parameters:,} parameters, {settings.workers} workers "
        f"({kind}), {settings.steps} steps, the first {settings.warmup_steps} warm-up",
        ("recipe", "val loss", *(["min-max"] if len(rows) > len(by_recipe) else []), "vs dense", "accuracy",
         "MB sent per rank", "x fewer", "bytes/step after warm-up", "x fewer", "s"),
        [_cells(text, group, dense, len(rows) > len(by_recipe)) for text, group in by_recipe.items()],
        text=("recipe",),
    )  # fmt: skip
    print(
        "x fewer: against a dense ring all-reduce of float32, 2 (P - 1) / P times 4 bytes a parameter; first of all "
        "steps, warm-up included.\n"
        "vs dense: loss against that of torch's optimizer, uncompressed, with the same learning rate, which need "
        "not be the best for either.\n"
        "Bytes of torch's own all-reduce and hooks are by the ring's formula, those of thinwire are counted."
    )
    if len({row.case.seed for row in rows}) == 1:
        print("One seed: a small difference between losses may be chance; --seeds 0 1 2 shows how much of it is.")


def _cells(text: str, rows: list[Row], dense: dict[str, float], with_range: bool) -> list[str]:
    losses, first = [row.loss for row in rows], rows[0]
    loss, reference = _mean(losses), dense.get(first.case.recipe.recipe.family)
    return [
        text,
        _or_diverged(loss),
        *([f"({_or_diverged(min(losses))}-{_or_diverged(max(losses))})"] if with_range else []),
        f"{loss / reference - 1:+.1%}" if reference and math.isfinite(loss) else "",
        f"{_mean([row.accuracy for row in rows]):.1%}",
        f"{_mean([row.bytes_total for row in rows]) / 1e6:,.3f}",
        f"{_mean([row.ratio for row in rows]):.1f}",
        f"{_mean([row.bytes_per_step for row in rows]):,.0f}",
        f"{_mean([row.ratio_per_step for row in rows]):.1f}",
        f"{sum(row.seconds for row in rows):.0f}",
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _or_diverged(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"
