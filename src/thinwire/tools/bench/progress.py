"""Shows the progress of a benchmark on stderr: a bar on a terminal, otherwise one line for each finished step."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Progress display of a benchmark with a known number of steps. Use it as a context manager."""

    def __init__(self, steps: int) -> None:
        self._steps, self._finished, self._title = steps, 0, ""
        console = Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
        self._bar = Bar(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bar.add_task("", total=steps) if self._bar else None

    def start(self, title: str) -> None:
        """Show the title of the step that begins."""
        self._title = title
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=title)

    def finish(self, summary: str) -> None:
        """Count the current step as finished. Without a terminal, print its title and `summary`."""
        self._finished += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._finished)
        else:
            print(f"[{self._finished}/{self._steps}] {self._title}: {summary}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
