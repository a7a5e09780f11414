"""Prints tables for people: as wide as the terminal, or as wide as needed in a file."""

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, text: Collection[str] = ()
) -> None:
    """Print a table to stdout. Columns whose header is in `text` are left-aligned, all others right-aligned."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(f"\n[bold]{title}[/]")
    console.print(table)
