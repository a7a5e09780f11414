"""Measure links and codec under torchrun, on all ranks at the same time, as they work in training.

The measurements call the public functions, so that they time the code that will run. Each is the median of a few calls,
and then of all ranks. Ranks that share a node share its cores and its link meanwhile.
"""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from itertools import cycle
from statistics import median

import torch
import torch.distributed as dist

from thinwire.collectives.cost import ring
from thinwire.compressors import Compressor
from thinwire.sync.buckets import BUCKET_BYTES
from thinwire.tools.place import Place
from thinwire.tools.train.control import pick_backend, pick_device

from .costs import Costs, Speeds
from .options import Cluster

_REPEATS, _PINGS, _PAYLOADS = 7, 30, 5
_TINY, _LARGE = 1 << 10, 1 << 21
"""Numel of a tensor whose all-reduce takes only the latency, and of one that shows the rate."""


def measure(made: Mapping[str, Compressor], place: Place) -> tuple[Cluster, Speeds]:
    """Measure on this rank, and return the cluster and the costs that all ranks measured."""
    if place.world_size < 2:
        raise ValueError("torchrun started one rank, which has nobody to exchange with: expected 2 or more")
    device = pick_device("cuda" if torch.cuda.is_available() else "cpu", place.local_rank)
    on_gpu, threads = device.type == "cuda", torch.get_num_threads()
    dist.init_process_group(pick_backend(device, place.local_world_size), timeout=timedelta(minutes=5))
    try:
        mine = _ping(), _byte(device), [_codec(given, device) for given in made.values()]
        answers = [mine] * place.world_size
        dist.all_gather_object(answers, mine)
    finally:
        dist.destroy_process_group()
    latencies, seconds, codecs = zip(*answers, strict=True)
    costs = (Costs(*map(median, zip(*some, strict=True))) for some in zip(*codecs, strict=True))
    name = torch.cuda.get_device_name(device) if on_gpu else f"{threads} thread(s)"
    # The time of a byte contains the CPU's part.
    speeds = Speeds(f"{name} per rank here", dict(zip(made.values(), costs, strict=True)), ring_byte=0.0)
    cluster = Cluster(place.world_size, 8 / median(seconds), max(latencies), 1.0, cores=None if on_gpu else threads)
    return cluster, speeds


def _seconds(job: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a job that all ranks start together, after two calls that do not count."""
    taken = []
    for _ in range(2 + _REPEATS):
        dist.barrier()
        started = time.perf_counter()
        job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return median(taken[2:])


def _codec(given: Compressor, device: torch.device) -> Costs:
    """Return the costs of a compressor."""
    numel = BUCKET_BYTES // 4
    tensors = [torch.randn(numel, device=device) for _ in range(3)]
    gradient, gradients = tensors[0], cycle(tensors)
    residual, out = torch.zeros_like(gradient), torch.empty_like(gradient)
    sent = given.encode(gradient, residual)
    rows = torch.stack([sent.payload] * _PAYLOADS)
    encode = _seconds(lambda: given.encode(next(gradients), residual), device) / numel
    write = _seconds(lambda: given.decompress(sent, out), device) / numel
    many = _seconds(lambda: given.decompress(sent, out, payloads=rows), device) / numel
    commit = _seconds(lambda: given.commit(sent, gradient, residual, finite=True), device) / numel
    return Costs(encode, commit, write, add=max(0.0, many - write) / (_PAYLOADS - 1))


def _byte(device: torch.device) -> float:
    """Return the seconds per byte that a rank sends to its neighbour in a ring: torch's all-reduce."""
    few, many = (torch.randn(numel, device=device) for numel in (_TINY, _LARGE))
    more = ring(many.nbytes, dist.get_world_size()) - ring(few.nbytes, dist.get_world_size())
    seconds = [_seconds(partial(dist.all_reduce, tensor), device) for tensor in (few, many)]
    return max(1e-13, (seconds[1] - seconds[0]) / more)


def _ping() -> float:
    """Return the seconds that a few bytes take between the first rank and the last; other ranks return 0."""
    mine, last = dist.get_rank(), dist.get_world_size() - 1
    if mine not in (0, last):
        return 0.0
    word, taken = torch.zeros(1), []
    for _ in range(_PINGS):
        started = time.perf_counter()
        for sender in (0, last):
            (dist.send if mine == sender else dist.recv)(word, last - mine)
        taken.append(time.perf_counter() - started)
    return median(taken) / 2
