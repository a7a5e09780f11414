"""`thinwire bench link`: measures a training step over real links of a given rate, with torch's methods and thinwire's.

Ranks are processes of this machine, each behind its own link. The links are network namespaces joined by shaped
interfaces (`lab`), which root or a user namespace can create, or a relay on the loopback interface (`relay`), which
needs no rights. Step times and bytes are measured and not computed. The time is the median over steps. The bytes are
those sent by a rank, as the mean over steps and ranks. In namespaces they include the headers of TCP and Ethernet.
"""

import os
import sys
from contextlib import ExitStack
from dataclasses import asdict

from thinwire.tools.bench.progress import Progress
from thinwire.tools.record import Writer, conditions

from .options import Options


def run(options: Options) -> int:
    """Measure and print the table. Return 0, or 1 if a way failed."""
    from .network import prepare
    from .settings import settings

    given = settings(options)
    if not given.relay:
        prepare()  # before torch is loaded: a process with threads cannot enter a user namespace
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch warns that addresses have no host names
    from thinwire.tools.workers import WorkerError

    from .command import command
    from .measured import measure_all
    from .table import print_rows
    from .timeline_page import page
    from .ways import way

    for name in given.ways:
        way(name)  # raises ValueError for an unknown compressor
    rows = []
    said = command(options)
    links = "relay" if given.relay else "namespaces"
    kept = {**asdict(options), "out": None, "timeline": None}
    under = conditions(**{**kept, "links": links, "worker_threads": 1, "command": said})
    failed = False
    try:
        with ExitStack() as stack:
            writer = stack.enter_context(Writer(options.out))
            writer.write(under)
            progress = stack.enter_context(Progress(len(given.rates) * len(given.worlds) * len(given.ways)))
            for row in measure_all(given, progress, timelines=options.timeline is not None):
                writer.write(row.record())
                rows.append(row)
    except WorkerError as error:
        print(f"thinwire bench link: FAILED, {error}", file=sys.stderr)
        failed = True
    print("thinwire {thinwire}, torch {torch}, {cpu}, {cores} cores, {date}".format(**under))
    print_rows(given, rows)
    if options.timeline is not None:
        options.timeline.write_text(page(rows, under, said), encoding="utf-8")
        print(f"{options.timeline}: open it in a browser")
    return int(failed)
