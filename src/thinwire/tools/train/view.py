"""Output of rank 0: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

PHASES = ("compute", "compress", "wait", "decode")


@dataclass(frozen=True)
class Result:
    """Final metrics of a training."""

    name: str
    steps: int
    loss: float
    accuracy: float | None
    bytes_sent: int
    bytes_dense: int
    reduction_after_warmup: float | None
    """That of the steps after the warm-up, since the start or the last resume; None if there were none."""
    interface_bytes: int | None
    """Bytes counted on the interface, per rank; None if they were not counted."""
    seconds: float
    split: dict[str, float]
    """Seconds per step, by phase."""
    ranks: list[dict[str, int]] = field(default_factory=list)
    """What each rank has sent, as in metrics.jsonl."""
    finished: bool = True
    """False if a signal stopped it."""


class View:
    """Shows the progress of one training. On ranks other than 0 nothing is shown."""

    def __init__(self, steps: int, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        console = Console(stderr=True)
        self._live: Live | None = None
        if shown and console.is_terminal:
            self._bar = Bar(BarColumn(), MofNCompleteColumn(), TextColumn("steps, time left"), TimeRemainingColumn())
            self._task = self._bar.add_task("", total=steps)
            self._live = Live(self._bar, console=console, transient=True, refresh_per_second=4)

    def say(self, text: str) -> None:
        """Print a line that stays on the screen."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)

    def step(self, line: Mapping[str, Any]) -> None:
        """Show the figures of a step."""
        if self._live is not None:  # below the bar, in as many lines as the terminal needs
            self._live.update(Group(self._bar, Text(_figures(line))))
        else:
            self.say(f"step {line['step']}/{self._steps}  {_figures(line)}")

    def advance(self, step: int) -> None:
        """Move the progress bar to a step. The first call shows it."""
        if self._live is not None:
            self._live.start()
            self._bar.update(self._task, completed=step)

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Print the validation loss and accuracy."""
        accuracy = "" if line["accuracy"] is None else f", accuracy {line['accuracy']:.2%}"
        self.say(f"step {line['step']}/{self._steps}  validation loss {line['loss']:.4f}{accuracy}")

    def close(self) -> None:
        """Remove the progress bar."""
        if self._live is not None:
            self._live.stop()


def reduction(sent: float, dense: float) -> str:
    """Return the bytes of a dense all-reduce divided by those sent, as text; empty if nothing was sent.

    >>> reduction(10, 375), reduction(10, 15), reduction(10, 10), reduction(3, 2), reduction(0, 0)
    ('38x', '1.5x', '1.0x', '0.7x', '')
    """
    if not sent or not dense:
        return ""
    return f"{dense / sent:.1f}x" if dense < 10 * sent else f"{dense / sent:.0f}x"


def print_results(results: Sequence[Result], world_size: int) -> None:
    """Print a table with a column for each training, so that it fits a narrow terminal."""
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    table = Table(f"{results[0].steps:,} step{'s' * (results[0].steps > 1)}, {ranks}", box=None, padding=(0, 2, 0, 0))
    for result in results:
        table.add_column(result.name, justify="right", no_wrap=True)
    has_nodes = any(each["bytes_inside_nodes"] for result in results for each in result.ranks)
    columns = [_cells(result, has_nodes) for result in results]
    for name in columns[0]:
        cells = [column.get(name) for column in columns]
        if any(cell is not None for cell in cells):
            table.add_row(name, *(cell or "" for cell in cells))
    Console().print(table)
    if len(results) == 2:
        print(compare(*results))


def compare(ours: Result, dense: Result) -> str:
    """Return the result of a training beside that of dense training, as one sentence."""
    parts = [f"{reduction(ours.seconds, dense.seconds)} as fast"]
    if ours.bytes_sent:
        parts.append(f"{100 * ours.bytes_sent / dense.bytes_sent:.1f} % of the bytes")
    if ours.accuracy is not None and dense.accuracy is not None:
        parts.append(f"accuracy {ours.accuracy:.1%} (dense {dense.accuracy:.1%})")
    else:
        parts.append(f"loss {ours.loss:.3f} (dense {dense.loss:.3f})")
    return f"Compared with dense training: {', '.join(parts)}."


def _cells(result: Result, has_nodes: bool) -> dict[str, str | None]:
    """Return the column of a training, by row; None where the row is left out unless another training has it.

    has_nodes   whether to add what rank 0 has sent between and inside nodes.
    """
    later = result.reduction_after_warmup
    cells = {
        "validation loss": f"{result.loss:.4f}",
        "accuracy": "" if result.accuracy is None else f"{result.accuracy:.2%}",
        "MB sent per rank": _megabytes(result.bytes_sent),
        "reduction": reduction(result.bytes_sent, result.bytes_dense),
        "  after the warm-up": None if later is None else reduction(1.0, later),
    }
    for where in ("between", "inside") if has_nodes and result.ranks else ():
        cells[f"  {where} nodes"] = _megabytes(result.ranks[0][f"bytes_{where}_nodes"])
    for each in result.ranks:
        if "replica" in each:
            name, sent = f"  replica {each['replica']}, by shard", _megabytes(each["bytes_between_nodes"])
            cells[name] = f"{cells[name]} {sent}" if name in cells else sent
    if result.interface_bytes is not None:
        cells["MB on the interface"] = _megabytes(result.interface_bytes)
    cells["seconds"] = f"{result.seconds:.1f}"
    cells["ms/step"] = f"{1000 * sum(result.split.values()):.1f}"
    return cells | {f"  {phase}": f"{1000 * result.split[phase]:.1f}" for phase in PHASES}


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.2f}"


def _figures(line: Mapping[str, Any]) -> str:
    split = "  ".join(f"{phase} {1000 * line['split'][phase]:.1f}" for phase in PHASES)
    ratio = reduction(line["bytes_sent"], line["bytes_dense"])
    return (
        f"loss {line['loss']:.4f}  {line['samples_per_second']:,.0f} samples/s  "
        f"{_megabytes(line['bytes_sent'])} MB sent{f' (reduction {ratio})' if ratio else ''}  ms: {split}"
    )
