"""Prints the rows as tables."""

from collections.abc import Sequence

from thinwire.tools.bench.tables import print_table

from .simulated import RANKS_IN_NODE, SimulatedRow
from .timed import RATIO_LIMIT, Ratio, TimeRow
from .timer import BARRIER, PARTS, WHOLE
from .traffic import COUNTS, FRAMING_LIMIT, LIMIT, ByteRow

_TEXT = ("compressor", "algorithm", "what", "")


def print_bytes(rows: Sequence[ByteRow]) -> None:
    """Print the bytes that each rank sends: counted, and from the formula."""
    if not rows:
        return
    print_table(
        f"Bytes sent per rank, {rows[0].case.numel:,} x float32",
        ("ranks", "compressor", "algorithm", "messages", "formula", "reported", "off", "interface", "off",
         "framing/message", ""),
        (
            (
                str(row.case.world),
                row.case.spec,
                row.case.algorithm + (f" -> {row.case.chosen}" if row.case.algorithm == "auto" else ""),
                f"{row.messages:g}",
                f"{row.case.cost.sent:,.0f}",
                f"{row.reported:,.0f}",
                f"{row.reported_off:.2%}",
                _or_not(row.interface, "{:,.0f}"),
                _or_not(row.interface_off, "{:.2%}"),
                _or_not(row.framing, "{:,.0f}"),
                "OFF" if row.fault else "ok",
            )
            for row in rows
        ),
        text=_TEXT,
    )  # fmt: skip
    print(
        f"ok: reported within {LIMIT:.0%} of the formula; on the loopback interface within {LIMIT:.0%} and "
        f"{FRAMING_LIMIT} bytes of framing for each message.\n"
        "framing/message: what gloo and TCP put around it, headers of further packets and acknowledgements included.\n"
        f"interface: the least of {COUNTS} counts or more, each between moments without traffic.\n"
        "torch: none without a residual is passed on to torch's own all-reduce; its report is the formula, not a count."
    )
    if missing := sum(row.interface is None for row in rows):
        print(f"n/a: {missing} of {len(rows)} rows not counted: the interface was never quiet, or the system has none.")
    for row in rows:
        if row.case.algorithm == "auto":
            print(f"auto, {row.case.world} ranks, {row.case.spec}: {row.case.chosen}; {row.reason}")


def print_times(rows: Sequence[TimeRow], ratio: Ratio) -> None:
    """Print the time of the whole operation and of its parts."""
    notes = {BARRIER: "taken off all others", WHOLE: "the whole", **dict.fromkeys(PARTS, "part")}
    print_table(
        f"Time, {rows[0].ranks} ranks, {rows[0].numel:,} x float32",
        ("what", "ms", "p20-p80", ""),
        (
            (row.name, f"{row.time.p50:.1f}", f"({row.time.p20:.1f}-{row.time.p80:.1f})", notes.get(row.name, ""))
            for row in rows
        ),
        text=_TEXT,
    )
    print(
        f"{WHOLE} {ratio.whole:.1f} ms / sum of its parts {ratio.parts:.1f} ms = {_or_not(ratio.value, '{:.3f}')}, "
        f"limit {RATIO_LIMIT:.2f}: {'ok' if ratio.ok else 'missed'}"
    )


def print_simulation(rows: Sequence[SimulatedRow]) -> None:
    """Print the costs computed from the formulas, for each world size."""
    if not rows:
        return
    dense = {row.world: row.sent for row in rows if row.algorithm == "dense"}
    print_table(
        f"Simulation, {rows[0].numel:,} x float32, per rank; hierarchical: nodes of {RANKS_IN_NODE} ranks",
        ("ranks", "algorithm", "MB sent", "of dense", "MB between nodes", "messages", "memory, MB",
         "segments in 1 GiB", "messages then", "memory then, MB"),
        (
            (
                f"{row.world:,}",
                row.algorithm,
                _megabytes(row.sent),
                f"{row.sent / dense[row.world]:.2%}",
                _megabytes(row.between_nodes),
                f"{row.messages:,}",
                _megabytes(row.memory),
                _or_not(row.budget_segments, "{:,}"),
                _or_not(row.budget_messages, "{:,}"),
                "n/a" if row.budget_memory is None else _megabytes(row.budget_memory),
            )
            for row in rows
        ),
        text=_TEXT,
    )  # fmt: skip
    print("One operation takes a quarter of the budget at most. n/a: not even its smallest segment fits.")


def _or_not(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.3f}"
