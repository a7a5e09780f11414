"""`thinwire bench allreduce`: measures bytes and time of `all_reduce_compressed`, and computes bytes at any scale.

bytes        what every rank sends, as the operation reports it and as the loopback interface counts it, compared with
             the formula from which the algorithm is chosen
time         the whole operation, and its parts compress, exchange and decompress, each measured alone and in turns
simulation   bytes, messages and memory from the formulas, for world sizes too large for one machine

If the bytes differ from their formula, the exit code is 1. Times never change the exit code, because the machine may be
busy.
"""

import sys

from thinwire.tools.bench.progress import Progress
from thinwire.tools.record import Writer, conditions

from .options import Options


def run(options: Options) -> int:
    """Measure, simulate and print the tables. Return 0, or 1 if bytes differ from their formula or a rank failed."""
    # These load torch; --help and errors in options should not wait for that.
    from thinwire.tools.workers import WorkerError, Workers

    from .settings import settings
    from .simulated import simulate
    from .table import print_bytes, print_simulation, print_times
    from .timed import ratio_of, time_all
    from .traffic import count_all

    given = settings(options)
    under = conditions(spec=options.spec, workers=given.workers, worker_threads=1, repeats=options.repeats)
    counted, timed = [], []
    try:
        with Writer(options.out) as writer, Workers(given.workers) as workers, Progress(given.steps) as progress:
            writer.write(under)
            for counts in count_all(given, workers, progress):
                writer.write(counts.record())
                counted.append(counts)
            for timing in time_all(given, workers, progress):
                writer.write(timing.record())
                timed.append(timing)
            ratio = ratio_of(timed) if timed else None
            if ratio is not None:
                writer.write(ratio.record())
            simulated = list(simulate(given))
            for row in simulated:
                writer.write(row.record())
    except WorkerError as error:
        print(f"thinwire bench allreduce: FAILED, {error}", file=sys.stderr)
        return 1
    print("thinwire {thinwire}, torch {torch}, {cpu}, {cores} cores, {spec}, {date}".format(**under))
    print_bytes(counted)
    if ratio is not None:
        print_times(timed, ratio)
    print_simulation(simulated)
    faults = [counts.fault for counts in counted if counts.fault]
    for fault in faults:
        print(f"thinwire bench allreduce: FAILED, {fault}", file=sys.stderr)
    return 1 if faults else 0
