"""`thinwire bench allreduce`: measures bytes and time of `all_reduce_compressed`, and computes bytes at any scale.

bytes        what every rank sends, as the operation reports it and as the loopback interface counts it, compared with
             the formula from which the algorithm is chosen
time         the whole operation, and its parts compress, exchange and decompress, each measured alone and in turns
simulation   bytes, messages and memory from the formulas, for world sizes too large for one machine

If the bytes differ from their formula, the exit code is 1. Times never change the exit code, because the machine may be
busy.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from thinwire.tools.units import parse_count

from ..harness import File, Line, Numbers, Progress, Row, arg, at_least, check_world, print_table
from ..harness import run as run_benchmark

Part = Literal["bytes", "time", "simulation"]
WORLDS, RANKS_IN_NODE = tuple(2**power for power in range(1, 13)), 8
"""World sizes of the simulation, and the ranks of a node in its hierarchical rows."""
_TEXT = ("compressor", "algorithm", "call", "")


@dataclass(frozen=True)
class Options:
    """Bytes and time of compressed all-reduces between processes on this machine, and bytes at any scale."""

    spec: str = "topk:ratio=1/64,bits=2"
    """The compressor."""
    parts: Annotated[tuple[Part, ...], arg(metavar="PART ...")] = ("bytes", "time", "simulation")
    """What to do: bytes, time, simulation."""
    worlds: Numbers = (2, 4, 8)
    """Numbers of ranks to count bytes for."""
    bytes_size: str = "4M"
    """Elements of the float32 tensor whose bytes are counted: 1e6, 25_000_000 or 25M."""
    size: str = "25M"
    """Elements of the float32 tensor that is timed and simulated."""
    ranks: int = 4
    """Number of ranks to time."""
    repeats: int = 15
    """Samples of each time."""
    out: File = None
    """Write JSON lines to this file: the conditions, then the rows."""


def run(options: Options) -> int:
    """Measure, simulate and print the tables. Return 0, or 1 if bytes differ from their formula or a rank failed."""
    # These load torch; --help and errors in options should not wait for that.
    from thinwire import compressors
    from thinwire.testing.pool import Workers

    from ..codec.cases import LARGEST
    from .ranks import cases, count_bytes, time_parts

    compressors.compressor(options.spec)
    bytes_numel = parse_count("--bytes-size", options.bytes_size, LARGEST)
    numel = parse_count("--size", options.size, LARGEST)
    if not options.parts:
        raise ValueError("--parts without a part, expected bytes, time or simulation")
    if not options.worlds:
        raise ValueError("--worlds without a number of ranks, expected one or more")
    for world in options.worlds:
        check_world("worlds", world)
    check_world("ranks", options.ranks)
    at_least(options, repeats=1)
    worlds = sorted(set(options.worlds)) if "bytes" in options.parts else []
    counted = [case for world in worlds for case in cases(options.spec, bytes_numel, world)]
    timed = "time" in options.parts
    processes = max([0, *worlds, *([options.ranks] if timed else [])])

    def measure(progress: Progress) -> Iterator[Row]:
        with Workers(processes) as workers:
            yield from count_bytes(counted, workers, progress)
            if timed:
                turns = {"ranks": options.ranks, "repeats": options.repeats}
                yield from time_parts(options.spec, numel, **turns, workers=workers, progress=progress)
        if "simulation" in options.parts:
            yield from simulate(options.spec, numel)

    return run_benchmark(
        options,
        measure,
        _show,
        name="bench allreduce",
        progress_steps=len(counted) + (1 + options.repeats if timed else 0),
        spec=options.spec,
        workers=processes,
        worker_threads=1,
        repeats=options.repeats,
    )


def simulate(spec: str, numel: int) -> Iterator[Row]:
    """Yield the cost of one operation for each rank, from the formulas, by world size, with dense last for each.

    `between_nodes` is the part of `sent` that leaves the node; with one stage it is all of it, as in the report of the
    operation. `memory` is that of an operation that is not cut into segments; with `budget` are the figures under the
    default memory budget, None if not even a segment fits.
    """
    import torch

    from thinwire import compressors
    from thinwire.collectives import cost
    from thinwire.collectives.plan import DEFAULT_MAX_BYTES

    from .ranks import flat, planned

    own = flat(compressors.compressor(spec), numel)
    for world in WORLDS:
        nodes = [("auto", RANKS_IN_NODE)] if world > RANKS_IN_NODE else []
        for algorithm, ranks_in_node in [("gather", 1), (own, 1), *nodes, ("dense", 1)]:
            given = {"numel": numel, "ranks": world // ranks_in_node, "ranks_in_node": ranks_in_node}
            whole, fitting = planned(spec, algorithm, **given), None
            with suppress(ValueError):  # the row then has None
                fitting = planned(spec, algorithm, **given, max_bytes=DEFAULT_MAX_BYTES)
            inside = cost.dense(numel, torch.float32, ranks_in_node).sent if ranks_in_node > 1 else 0.0
            yield {
                "kind": "allreduce simulation",
                "world": world,
                "algorithm": ("hierarchical, " if ranks_in_node > 1 else "") + whole.algorithm,
                "sent": whole.cost.sent,
                "between_nodes": whole.cost.sent - inside,
                "messages": whole.cost.messages,
                "memory": whole.cost.memory,
                "budget_segments": None if fitting is None else len(fitting.segments),
                "budget_messages": None if fitting is None else fitting.cost.messages,
                "budget_memory": None if fitting is None else fitting.cost.memory,
                "numel": numel,
            }


def _show(rows: list[Row], _: Line) -> None:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["kind"].removeprefix("allreduce "), []).append(row)
    if "bytes" in found:
        _show_bytes(found["bytes"])
    if "ratio" in found:
        _show_times(found["time"], found["ratio"][0])
    if "simulation" in found:
        _show_simulation(found["simulation"])


def _show_bytes(rows: list[Row]) -> None:
    from .ranks import COUNTS, FRAMING_LIMIT, LIMIT

    print_table(
        f"Bytes sent per rank, {rows[0]['numel']:,} x float32",
        [
            {
                "ranks": str(row["world"]),
                "compressor": row["spec"],
                "algorithm": row["algorithm"] + (f" -> {row['chosen']}" if row["algorithm"] == "auto" else ""),
                "messages": f"{row['messages']:g}",
                "formula": f"{row['formula_bytes']:,.0f}",
                "reported": f"{row['reported_bytes']:,.0f}",
                "off": f"{row['reported_off']:.2%}",
                "interface": _or_not(row["interface_bytes"], "{:,.0f}"),
                "interface off": _or_not(row["interface_off"], "{:.2%}"),
                "framing/message": _or_not(row["framing_bytes_per_message"], "{:,.0f}"),
                "": "OFF" if row["fault"] else "ok",
            }
            for row in rows
        ],
        text=_TEXT,
    )
    print(
        f"ok: reported within {LIMIT:.0%} of the formula; on the loopback interface within {LIMIT:.0%} and "
        f"{FRAMING_LIMIT} bytes of framing for each message.\n"
        "framing/message: what gloo and TCP put around it, headers of further packets and acknowledgements included.\n"
        f"interface: the least of {COUNTS} counts or more, each between moments without traffic."
    )
    if missing := sum(row["interface_bytes"] is None for row in rows):
        print(f"n/a: {missing} of {len(rows)} rows not counted: the interface was never quiet, or the system has none.")
    for row in rows:
        if row["algorithm"] == "auto":
            print(f"auto, {row['world']} ranks, {row['spec']}: {row['reason']}")


def _show_times(rows: list[Row], ratio: Row) -> None:
    from .ranks import BARRIER, PARTS, WHOLE

    notes = {BARRIER: "subtracted from all others", WHOLE: "the whole", **dict.fromkeys(PARTS, "part")}
    print_table(
        f"Time, {rows[0]['ranks']} ranks, {rows[0]['numel']:,} x float32",
        [
            {
                "call": row["name"],
                **{"p50 ms" if part == "p50" else part: f"{row['ms'][part]:.1f}" for part in ("p20", "p50", "p80")},
                "": notes.get(row["name"], ""),
            }
            for row in rows
        ],
        text=_TEXT,
    )
    print(
        f"{WHOLE} {ratio['whole_ms']:.1f} ms / sum of its parts {ratio['parts_ms']:.1f} ms = "
        f"{_or_not(ratio['ratio'], '{:.3f}')}"
    )


def _show_simulation(rows: list[Row]) -> None:
    dense = {row["world"]: row["sent"] for row in rows if row["algorithm"] == "dense"}
    print_table(
        f"Simulation, {rows[0]['numel']:,} x float32, per rank; hierarchical: nodes of {RANKS_IN_NODE} ranks",
        [
            {
                "ranks": f"{row['world']:,}",
                "algorithm": row["algorithm"],
                "MB sent": f"{row['sent'] / 1e6:,.3f}",
                "MB between nodes": f"{row['between_nodes'] / 1e6:,.3f}",
                "MB of memory": f"{row['memory'] / 1e6:,.3f}",
                "MB in 1 GiB": "n/a" if row["budget_memory"] is None else f"{row['budget_memory'] / 1e6:,.3f}",
                "of dense": f"{row['sent'] / dense[row['world']]:.2%}",
                "messages": f"{row['messages']:,}",
                "segments in 1 GiB": _or_not(row["budget_segments"], "{:,}"),
                "messages in 1 GiB": _or_not(row["budget_messages"], "{:,}"),
            }
            for row in rows
        ],
        text=_TEXT,
    )
    print("in 1 GiB: one operation takes a quarter of that budget at most. n/a: not even its smallest segment fits.")


def _or_not(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)
