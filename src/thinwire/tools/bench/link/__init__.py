"""`thinwire bench link`: measures a training step over real links of a given rate, by torch's methods and thinwire's.

Ranks are processes of this machine, each behind its own link. The links are network namespaces joined by shaped
interfaces (`lab`), which root or a user namespace can create, or a relay on the loopback interface (`relay`), which
needs no rights. Step times and bytes are measured and not computed. The time is the median over steps; with local
steps, of which one in several exchanges, it is the mean over whole rounds. The bytes are those sent by a rank, as the
mean over steps and ranks. In namespaces they include the headers of TCP and Ethernet.
"""

import os
from dataclasses import asdict

from thinwire.tools.units import LinkSpeed

from ..harness import Row, print_table
from ..harness import run as run_benchmark
from ..methods import INSTALL_POWERSGD, POWERSGD_PACKAGE
from ..results.links import LINKS
from .settings import Options, check, has_powersgd_package


def run(options: Options) -> int:
    """Measure and print the table. Return 0, or 1 if a method failed."""
    from thinwire.tools.links.network import prepare

    check(options)
    if not options.relay:
        reason = prepare()
        if reason is not None:
            raise ValueError(
                f"no links by network namespaces: {reason}; --relay needs no rights and no tools: ranks on the "
                "loopback interface, through a relay that holds their bytes back"
            )
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch warns that addresses have no host names
    from .. import training
    from .rounds import measure
    from .timeline import Timeline, write_trace

    for method in options.chosen:
        training.check(method.text)  # raises ValueError for an unknown compressor
    timelines: dict[str, Timeline] | None = None if options.timeline is None else {}
    kept = {name: value for name, value in asdict(options).items() if name not in ("out", "timeline")}
    code = run_benchmark(
        options,
        lambda progress: measure(options, progress, timelines),
        lambda rows, _: _show(options, rows),
        name="bench link",
        progress_steps=len(options.rates) * len(options.worlds) * len(options.chosen),
        links="relay" if options.relay else "namespaces",
        worker_threads=1,
        **kept,
    )
    if options.timeline is not None and timelines:
        write_trace(timelines, options.timeline)
        print(f"{options.timeline}: one step of each method; open it at https://ui.perfetto.dev")
    return code


def _show(options: Options, rows: list[Row]) -> None:
    """Print a table for each world size."""
    methods, speeds = options.chosen, options.speeds
    statistic = "median of a step" + (
        " (local steps: mean over whole rounds)" if any(method.is_local for method in methods) else ""
    )
    for world in options.worlds:
        found = {(row["method"], row["rate"]): row for row in rows if row["world"] == world}
        print_table(
            f"{world} ranks, {options.model}, {statistic}",
            [_cells(method.text, found, speeds) for method in methods],
            text=("method",),
        )
    print("speed-up: over dense. MB/step: at the slowest rate; over faster links packets have fewer headers.")
    print(f"Links: {LINKS['relay' if options.relay else 'namespaces']}.")
    if any(speed.round_trip for speed in speeds.values()):
        what = "byte" if options.relay else "packet"
        print(f"Round-trip times, behind the comma: thinwire delivers each {what} half of it after it was sent.")
    if "all" in options.methods and not has_powersgd_package():
        print(f"Left out: {POWERSGD_PACKAGE}, which is not installed ({INSTALL_POWERSGD}).")


def _cells(method: str, found: dict[tuple[str, str], Row], rates: dict[str, LinkSpeed]) -> dict[str, str]:
    here, dense = ({rate: found[name, rate] for rate in rates if (name, rate) in found} for name in (method, "dense"))
    slowest = min(here, key=rates.__getitem__, default="")
    return {
        "method": method,
        **{f"{rate}, ms": f"{here[rate]['ms']:,.1f}" if rate in here else "" for rate in rates},
        "MB/step": f"{here[slowest]['bytes_per_step'] / 1e6:,.3f}" if here else "",
        **{
            f"speed-up, {rate}": f"{dense[rate]['ms'] / here[rate]['ms']:.2f}" if rate in here and rate in dense else ""
            for rate in rates
        },
    }
