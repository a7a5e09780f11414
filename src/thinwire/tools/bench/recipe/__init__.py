"""`thinwire bench recipe`: trains the same model by different recipes and compares loss and bytes sent.

A recipe is an optimizer and a way to exchange gradients or updates. All recipes start from the same weights and have
the same data and the same schedule. The table shows the validation loss and the bytes that each rank sent, warm-up
included. Ranks are processes with DDP over gloo, or, with --simulate, threads of one process.

If ranks end with different weights, the exit code is 1. Losses never change the exit code.
"""

import sys
from contextlib import ExitStack

from thinwire.tools.bench.progress import Progress
from thinwire.tools.record import Writer, conditions

from .options import Options


def run(options: Options) -> int:
    """Train and print the table. Return 0, or 1 if ranks ended with different weights or a rank failed."""
    # These load torch; --help and errors in options should not wait for that.
    from thinwire.tools.workers import WorkerError, Workers

    from .measured import measure_all
    from .settings import settings
    from .table import print_rows
    from .threads import Threads

    given = settings(options)
    under = conditions(**given.record())
    rows = []
    try:
        with ExitStack() as stack:
            writer = stack.enter_context(Writer(options.out))
            writer.write(under)
            workers: Threads | Workers = Threads() if given.simulate else Workers(given.workers)
            stack.enter_context(workers)
            progress = stack.enter_context(Progress(len(given.cases)))
            for row in measure_all(given, workers, progress):
                writer.write(row.record())
                rows.append(row)
    except WorkerError as error:
        print(f"thinwire bench recipe: FAILED, {error}", file=sys.stderr)
        return 1
    print("thinwire {thinwire}, torch {torch}, {cpu}, {cores} cores, device {device}, {date}".format(**under))
    print_rows(given, rows)
    faults = [row.fault for row in rows if row.fault]
    for fault in faults:
        print(f"thinwire bench recipe: FAILED, {fault}", file=sys.stderr)
    return 1 if faults else 0
