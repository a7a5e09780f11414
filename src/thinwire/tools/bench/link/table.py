"""Prints the tables of milliseconds and bytes, with a row for each way and a column for each rate."""

from collections.abc import Sequence

from thinwire.tools.bench.tables import print_table

from .measured import Row
from .settings import INSTALL_POWERSGD, Settings


def print_rows(settings: Settings, rows: Sequence[Row]) -> None:
    """Print a table for each world size."""
    for world in settings.worlds:
        found = {(row.way, row.rate): row for row in rows if row.world == world}
        headers = [
            "",
            *(f"{rate}, ms" for rate in settings.rates),
            "MB a step",
            *(f"{r}, x dense" for r in settings.rates),
        ]
        lines = [_line(way, found, settings) for way in settings.ways]
        print_table(f"{world} ranks, {settings.model.kind}, median of a step", headers, lines, text=[""])
    if settings.left_out:
        print(f"Left out: {', '.join(settings.left_out)}, which is not installed ({INSTALL_POWERSGD}).")


def _line(way: str, found: dict[tuple[str, str], Row], settings: Settings) -> list[str]:
    here = {rate: found.get((way, rate)) for rate in settings.rates}
    dense = {rate: found.get(("dense", rate)) for rate in settings.rates}
    sent = [row.bytes_per_step for row in here.values() if row is not None]
    faster = []
    for rate, row in here.items():
        reference = dense[rate]
        faster.append("" if row is None or reference is None else f"{reference.ms / row.ms:.2f}")
    return [
        way,
        *("" if row is None else f"{row.ms:,.1f}" for row in here.values()),
        f"{sent[-1] / 1e6:,.3f}" if sent else "",
        *faster,
    ]
