"""Print the predictions as a table, and the numbers that they are based on."""

from collections.abc import Sequence

from thinwire.compressors import Compressor
from thinwire.tools.bench.tables import print_table

from .host import Host
from .model import Case, Prediction
from .simulate import Simulated
from .units import show_bytes, show_count, show_rate, show_seconds
from .ways import is_auto


def print_case(case: Case, host: Host) -> None:
    """Print the numbers that the predictions are based on."""
    work, cluster = case.work, case.cluster
    hosts = f" on {cluster.hosts:,} hosts" if cluster.ranks_per_host > 1 else ""
    print(
        f"{show_count(work.entries)} parameters in {len(work.buckets):,} buckets; {cluster.world:,} ranks{hosts}, each "
        f"with a link of {show_rate(cluster.rate)}, "
        f"latency {show_seconds(cluster.latency)}; "
        f"a step without communication {show_seconds(work.seconds)}, {show_seconds(work.backward)} of it backward"
    )
    rates = (f"{spec} {show_count(1 / (c.encode + c.commit))}" for spec, c in case.speeds.codecs.items())
    print(f"codec: {case.speeds.origin}; elements compressed in a second: {', '.join(rates)}")
    if host.simulated:
        switches = "one switch" if host.per_switch is None else f"{host.per_switch} hosts at a switch"
        print(f"simulated: {switches}, oversubscription {host.oversubscription:g}, jitter {host.jitter:.0%}")


def print_predictions(
    case: Case, predictions: Sequence[Prediction], made: dict[str, Compressor], simulated: Sequence[Simulated]
) -> None:
    """Print one row for each prediction, with the simulated times if there are any."""
    dense = predictions[0].seconds
    headers = ["compressor", "algorithm", "step", "x dense", "sent by a rank", "messages", "residual", "buffers"]
    if simulated:
        headers[4:4] = ["simulated", "x dense, simulated"]

    def _is_auto(one: Prediction) -> bool:
        return one.way.compresses and is_auto(one.way, made[one.way.spec], case.work, case.cluster)

    lines = []
    for index, one in enumerate(predictions):
        line = [
            one.way.spec,
            one.way.shown_algorithm + (" (auto)" if _is_auto(one) else ""),
            show_seconds(one.seconds),
            f"{dense / one.seconds:.2f}",
            _sent(one),
            f"{one.footprint.messages:,}",
            show_bytes(one.footprint.residual),
            show_bytes(one.footprint.buffers),
        ]
        if simulated:
            seconds = simulated[index].seconds
            line[4:4] = [show_seconds(seconds), f"{simulated[0].seconds / seconds:.2f}"]
        lines.append(line)
    print_table("Predicted for one step", headers, lines, text=("compressor", "algorithm"))


def _sent(one: Prediction) -> str:
    sent, inside = one.footprint.sent, one.footprint.inside
    return f"{show_bytes(sent - inside)}, {show_bytes(inside)} inside" if inside else show_bytes(sent)
