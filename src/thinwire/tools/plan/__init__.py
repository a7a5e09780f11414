"""`thinwire plan`: will compression help me? Predicts a step by every way there is, and may answer: no.

cluster, work, costs, ways       what is known: links, buckets, the codec, what each way does
footprint                        bytes, messages and memory
model, simulate                  a step's time, as a schedule; and event by event, for worlds of thousands
advice, table, plot              what to make of it
settings, scenario               all of that from numbers
cluster_run, findings            and measured under torchrun: `measure` has codec and wire, `alone` the steps of a rank
check                            predictions beside what `thinwire bench link` measured
"""

from .options import Options


def run(options: Options) -> int:
    """Print the table and what to use."""
    from .command import command  # which reads the options before it loads torch

    return command(options)
