"""Predict whether compression makes a training step faster: the command `thinwire plan`.

options    what the user gives, checked before torch is loaded; ranks and their links
costs      buckets of a model; speed of codec and wire
methods    what each method computes and sends for a bucket
model      time, bytes and memory of a step
local      local steps: one exchange for many steps, another algorithm
measure    under torchrun: links and codec, measured by all ranks
show       the tables and the recommendation
"""

import time

from thinwire.tools.place import Place

from .options import Options, parse_cluster, parse_model

_CONSEQUENCE_SECONDS = 15.0


def run(options: Options) -> int:
    """Run `thinwire plan` and return 0; raise ValueError for invalid options, before torch is loaded if possible.

    Under torchrun every rank measures, and rank 0 prints. Other ranks wait before they raise, so that rank 0 alone
    reports an error that all ranks have.
    """
    place = Place.of_torchrun()
    try:
        _plan(options, place)
    except ValueError as error:
        if place is None or place.rank == 0:
            raise
        time.sleep(_CONSEQUENCE_SECONDS)  # if rank 0 fails too, torchrun ends this rank in the meantime
        raise ValueError(f"rank {place.rank} of {place.world_size}: {error}") from None
    return 0


def _plan(options: Options, place: Place | None) -> None:
    numel, compute, memory = parse_model(options, is_measured=place is not None)
    cluster = None if place else parse_cluster(options)
    import torch

    from .costs import buckets, known_speeds, parse_specs
    from .measure import measure
    from .model import Case
    from .show import show

    made, dtype = parse_specs(options.specs), getattr(torch, options.gradients)
    if place is not None:
        cluster, speeds = measure(made, place)
    else:
        assert cluster is not None
        speeds = known_speeds(made, cluster.cores)
    if place is None or place.rank == 0:
        show(Case(buckets(numel, dtype.itemsize), compute, cluster, speeds, dtype, options.shard, memory), made)
