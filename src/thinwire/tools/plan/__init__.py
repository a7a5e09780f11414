"""Predict whether compression makes a training step faster: the command `thinwire plan`.

cluster, work, costs, ways       inputs: links, buckets, speed of the codec, phases of each way to reduce
footprint                        bytes, messages and memory
model, simulate                  step time, from a schedule or event by event for thousands of ranks
advice, table, plot              output: which way to use, the table, the plot
settings, scenario               a case built from numbers that the user gives
cluster_run, findings            a case measured with torchrun: codec and wire by `measure`, one-rank steps by `alone`
check                            predictions compared with the measurements of `thinwire bench link`
"""

from .options import Options


def run(options: Options) -> int:
    """Run `thinwire plan` and return the exit code."""
    from .command import command  # here, because it checks the options before it loads torch

    return command(options)
