"""Plan under torchrun: every rank measures itself and its links, and rank 0 prints the plan."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.compressors import Compressor
from thinwire.tools.record import cores
from thinwire.tools.train.place import Place, pick_backend, pick_device

from .alone import Steps, alone, measure_steps, names_of
from .combine import Measured
from .findings import Answer, case_of
from .host import Host, parse_host
from .measure import ENTRIES, Bench, Wire, measure_codecs, measure_wire
from .options import Options
from .scenario import compressors
from .settings import refuse_others
from .show import show
from .subject import subject_of
from .work import of_sizes

_TIMEOUT = timedelta(seconds=300)
_ECHO_SECONDS = 15.0


def measured(options: Options, place: Place) -> int:
    """Measure on all ranks, print the plan on rank 0, and return 0.

    Raise ValueError if something cannot be measured. Other ranks wait before they raise, so that rank 0 alone reports
    an error that all ranks have.
    """
    try:
        host, made = _check(options, place), compressors(options.specs)
        device = pick_device("cuda" if torch.cuda.is_available() else "cpu", place.local_rank)
        assert options.model is not None
        subject = subject_of(options.model, device)
        subject()  # a model that cannot be built fails here, before other ranks wait for this one
    except (ValueError, OSError) as error:
        if place.rank == 0:
            raise
        time.sleep(_ECHO_SECONDS)  # if rank 0 fails too, torchrun ends this rank in the meantime
        raise ValueError(f"rank {place.rank} of {place.world_size}: {error}") from None
    backend = pick_backend(device, place.local_world_size)
    crowd = max(1.0, place.local_world_size * torch.get_num_threads() / cores())
    with alone(backend):
        bench = Bench(device, crowd=crowd)
        steps = measure_steps(subject, names_of(made), bench)
        sizes = [parameter.numel() for parameter in subject()[0].parameters() if parameter.requires_grad]
    answers = _with_others(made, Bench(device, dist.barrier, crowd), backend, place, steps, sizes)
    if place.rank == 0:
        shared = max(1, place.local_world_size * torch.get_num_threads())
        slows = None if device.type == "cuda" else max(0.0, min(1.0, 2 - cores() / shared))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} thread(s)"
        case = case_of(answers, place.local_world_size, f"measured here, {name} a rank", crowd, slows)
        show(case, options, host)
        sys.stdout.flush()
    return 0


def _check(options: Options, place: Place) -> Host:
    refuse_others(options, {"model", "specs", "host", "plot"}, "under torchrun it is measured")
    if options.model is None:
        raise ValueError(
            "--model not given, expected one of thinwire train's, such as gpt:layers=4,width=256, or FILE.py:FUNCTION"
        )
    if place.world_size < 2:
        raise ValueError(
            "torchrun started one rank, which has nobody to exchange with: expected --nproc-per-node 2 or more, or "
            "several --nnodes"
        )
    host = parse_host(options.host)
    if (host.ranks, host.cores, host.inside) != (1, None, Host().inside):
        raise ValueError(
            f"--host {options.host}: under torchrun ranks, cores and inside are measured; expected only per_switch, "
            "oversubscription and jitter"
        )
    return host


def _with_others(
    made: Mapping[str, Compressor],
    bench: Bench,
    backend: str,
    place: Place,
    steps: Steps,
    sizes: list[int],
) -> list[Answer]:
    """Measure codec and wire together with the other ranks, and return the answers of all ranks."""
    dist.init_process_group(backend, timeout=_TIMEOUT)
    try:
        largest = max(bucket.entries for bucket in of_sizes(sizes))
        codecs, halves = measure_codecs(made, bench, min(ENTRIES, largest))
        mine = Answer(Measured(codecs, halves, steps), measure_wire(bench), _inside(bench, place), sizes)
        found: list[Answer] = [mine] * place.world_size
        dist.all_gather_object(found, mine)
        return found
    finally:
        dist.destroy_process_group()


def _inside(bench: Bench, place: Place) -> Wire | None:
    """Measure the wire among the ranks of this node, which torchrun numbers consecutively.

    Return None if the node has only one rank, or if there is only one node.
    """
    each = place.local_world_size
    if each == 1 or each == place.world_size:
        return None
    groups = [dist.new_group(range(start, start + each)) for start in range(0, place.world_size, each)]
    return measure_wire(bench, groups[place.rank // each])
