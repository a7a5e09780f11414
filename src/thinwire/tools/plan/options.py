"""Define the command-line options of `thinwire plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

DEFAULT_SPECS = ("quantize:bits=8", "quantize:bits=4", "topk:ratio=1/64,bits=2")


@dataclass(frozen=True)
class Options:
    """Step time, bytes and memory of every compressor and algorithm, and which to use, if any.

    By numbers: thinwire plan --params 7e9 --world 64 --bandwidth 1gbit --step-compute 2s

    Measured: torchrun --nnodes 2 ... -m thinwire plan --model gpt:layers=4,width=256
    """

    params: Annotated[str | None, arg(metavar="COUNT", help_behavior_hint="")] = None
    """Parameters of the model: 7e9, 350M, 7B."""
    world: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Ranks."""
    bandwidth: Annotated[str | None, arg(metavar="RATE", help_behavior_hint="")] = None
    """Of each host's link, each way: 100mbit, 25gbit."""
    step_compute: Annotated[str | None, arg(metavar="TIME", help_behavior_hint="")] = None
    """A step without communication, forward, backward and optimizer: 2s, 150ms."""
    latency: Annotated[str, arg(metavar="TIME")] = "50us"
    """From sending a message to its arrival."""
    host: Annotated[str, arg(metavar="SPEC")] = "ranks=1"
    """What a host has, such as ranks=8,inside=300gbit (ranks that share its link, and the rate between two of them);
    cores=16 if the model runs on its CPU; per_switch=32,oversubscription=4 and jitter=5% to simulate switches,
    and ranks that differ."""
    specs: Annotated[tuple[str, ...], arg(metavar="SPEC ...")] = DEFAULT_SPECS
    """Compressors to compare."""
    codec: Annotated[str, arg(metavar="SPEED")] = "auto"
    """Entries that a rank compresses in a second, such as 20e9; here: measure it on this machine; auto: what was
    measured on one core for each rank, or, if the host has no cores, on an H200."""
    model: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="")] = None
    """Under torchrun: what to measure, a spec of thinwire train's or FILE.py:FUNCTION, which returns a module and a
    function that makes its loss."""
    plot: Annotated[Path | None, arg(metavar="FILE.svg", help_behavior_hint="")] = None
    """Draw the speed-up against bandwidth and world size."""
    check: Annotated[Path | None, arg(metavar="ROWS", help_behavior_hint="")] = None
    """Predict what is in this file of thinwire bench link --out, and print predicted beside measured."""
