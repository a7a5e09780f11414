"""Output of rank 0: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PHASES = ("compute", "compress", "wait", "decode")


@dataclass(frozen=True)
class Result:
    """The end of a training."""

    name: str
    finished: bool  # False if a signal stopped it
    end: Mapping[str, Any]  # the last line of metrics.jsonl
    score: Mapping[str, Any]  # loss and accuracy of the last evaluation, if there was one
    interface_bytes: int | None  # per rank, if they are counted
    split: Mapping[str, float]  # seconds per step, by phase


class View:
    """Shows the progress of one training. On ranks other than 0 nothing is shown."""

    def __init__(self, steps: int, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        console = Console(stderr=True)
        self._live: Live | None = None
        if shown and console.is_terminal:
            text = TextColumn("steps, time left")
            self._bar = Progress(BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
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
        split = "  ".join(f"{phase} {1000 * line['split'][phase]:.1f}" for phase in PHASES)
        ratio = reduction(line["bytes_sent"], line["bytes_dense"])
        figures = (
            f"loss {line['loss']:.4f}  {line['samples_per_second']:,.0f} samples/s  "
            f"{_megabytes(line['bytes_sent'])} MB sent{f' (reduction {ratio})' if ratio else ''}  ms: {split}"
        )
        if self._live is not None:  # below the bar, in as many lines as the terminal needs
            self._live.update(Group(self._bar, Text(figures)))
        else:
            self.say(f"step {line['step']}/{self._steps}  {figures}")

    def advance(self, step: int) -> None:
        """Move the progress bar to a step. The first call shows it."""
        if self._live is not None:
            self._live.start()
            self._bar.update(self._task, completed=step)

    def evaluation(self, step: int, loss: float, accuracy: float) -> None:
        """Print the validation loss and accuracy."""
        self.say(f"step {step}/{self._steps}  validation loss {loss:.4f}, accuracy {accuracy:.2%}")

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
    """Print a table with a column for each training, so that it fits a narrow terminal, and compare two in words."""
    steps = results[0].end["step"]
    title = f"{steps:,} step{'s' * (steps > 1)}, {world_size} rank{'s' * (world_size > 1)}"
    table = Table(title, box=None, padding=(0, 2, 0, 0))
    for result in results:
        table.add_column(result.name, justify="right", no_wrap=True)
    columns = [_cells(result) for result in results]
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    Console().print(table)
    if len(results) == 2:
        ours, dense = results
        print(
            f"Compared with dense training: {reduction(ours.end['seconds'], dense.end['seconds'])} as fast, "
            f"{100 * ours.end['bytes_sent'] / dense.end['bytes_sent']:.1f} % of the bytes, "
            f"accuracy {ours.score['accuracy']:.1%} (dense {dense.score['accuracy']:.1%})."
        )


def _cells(result: Result) -> dict[str, str]:
    """Return the column of a training, by row."""
    end, first = result.end, result.end["ranks"][0]
    cells = {
        "validation loss": f"{result.score['loss']:.4f}",
        "accuracy": f"{result.score['accuracy']:.2%}",
        "MB sent per rank": _megabytes(end["bytes_sent"]),
        "reduction": reduction(end["bytes_sent"], end["bytes_dense"]),
    }
    if "reduction_after_warmup" in end:
        cells["  after the warm-up"] = reduction(1.0, end["reduction_after_warmup"])
    if any(each["bytes_inside_nodes"] for each in end["ranks"]):
        cells |= {f"  {where} nodes": _megabytes(first[f"bytes_{where}_nodes"]) for where in ("between", "inside")}
    for each in end["ranks"]:
        if "replica" in each:
            name = f"  replica {each['replica']}, by shard"
            cells[name] = f"{cells.get(name, '')} {_megabytes(each['bytes_between_nodes'])}".strip()
    if result.interface_bytes is not None:
        cells["MB on the interface"] = _megabytes(result.interface_bytes)
    cells["seconds"] = f"{end['seconds']:.1f}"
    cells["ms/step"] = f"{1000 * sum(result.split.values()):.1f}"
    return cells | {f"  {phase}": f"{1000 * result.split[phase]:.1f}" for phase in PHASES}


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.2f}"
