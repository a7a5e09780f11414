"""Measure the codec and the wire of a rank, while all other ranks do the same.

The measurements call the public functions, so that they time the code that will run, and take the median of a few
calls. With one CPU thread, work is measured as CPU time, which other programs do not disturb, times the number of ranks
that share a core. Otherwise it is measured as wall-clock time.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from thinwire.collectives import Handle
from thinwire.collectives.cost import ring
from thinwire.compressors import Compressor
from thinwire.sync.buckets import BUCKET_BYTES

from .costs import Costs

ENTRIES = BUCKET_BYTES // 4
REPEATS = 7
_PAYLOADS = 5
_TINY, _LARGE = 1 << 10, 1 << 21
"""Numel of a tensor whose exchange takes only the latency, and of a tensor that shows the rate."""
_PROBE = "quantize:bits=8"
"""Compressor for the measurement of the wire: one byte per element."""
_PINGS = 30

Job = Callable[[], object]


@dataclass(frozen=True)
class Bench:
    """Timer for jobs on this rank.

    meet     function that waits for all ranks.
    crowd    ranks of this node per core, at least 1.
    """

    device: torch.device
    meet: Job = lambda: None
    crowd: float = 1.0

    @property
    def _counts_work(self) -> bool:
        return self.device.type == "cpu" and torch.get_num_threads() == 1

    def now(self) -> float:
        """Return the current time in seconds: CPU time times `crowd` with one CPU thread, else wall-clock time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.crowd * time.process_time() if self._counts_work else time.perf_counter()

    def work(self, job: Job) -> float:
        """Return the median seconds of a job, measured in the same way as by `now`."""
        taken = self.both(job)
        return self.crowd * taken.processor if self._counts_work else taken.clock

    def both(self, job: Job) -> "Taken":
        """Return the median times of a job, after two calls that do not count."""
        clock, processor = [], []
        for _ in range(2 + REPEATS):
            self.meet()
            started, worked = time.perf_counter(), time.process_time()
            job()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            clock.append(time.perf_counter() - started)
            processor.append(time.process_time() - worked)
        return Taken(median(clock[2:]), median(processor[2:]))


class Taken(NamedTuple):
    """Wall-clock seconds, and CPU seconds of all threads of this process."""

    clock: float
    processor: float


@dataclass(frozen=True)
class Wire:
    """Latency of a wire, and its costs per byte, in seconds."""

    latency: float
    ring_byte: float
    spread_byte: float
    """Wall-clock seconds per byte that a rank sends: to its neighbour in a ring, and to all other ranks."""
    ring_work: float
    spread_work: float
    """CPU seconds per byte for the same two transfers, times `Bench.crowd`."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch, which thinwire's kernels also use, for the duration of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_codecs(
    made: Mapping[str, Compressor], bench: Bench, entries: int = ENTRIES
) -> tuple[dict[str, Costs], Costs]:
    """Return the costs of each compressor, by spec, and those of the cast to 16 bits and back."""
    device = bench.device
    tensors = [torch.randn(entries, device=device) for _ in range(3)]
    turns = iter(range(1 << 30))
    out = torch.empty(entries, device=device)

    def gradient() -> Tensor:
        return tensors[next(turns) % len(tensors)]

    def seconds(job: Job) -> float:
        return bench.work(job) / entries

    def costs(given: Compressor) -> Costs:
        residual = torch.zeros(entries, device=device) if given.contracts else None
        key = 1 if given.draws else None
        sent = given.encode(tensors[0], residual, key=key)
        rows = torch.stack([sent.payload] * _PAYLOADS)
        encode = seconds(lambda: given.encode(gradient(), residual, key=key))
        commit = 0.0 if residual is None else seconds(lambda: given.commit(sent, tensors[0], residual, finite=True))
        one = seconds(lambda: given.decompress(sent, out))
        many = seconds(lambda: given.decompress(sent, out, payloads=rows))
        return Costs(encode, commit, one, max(0.0, many - one) / (_PAYLOADS - 1))

    found = {spec: costs(given) for spec, given in made.items()}
    half = tensors[0].to(torch.float16)
    cast = seconds(lambda: gradient().to(torch.float16).div_(2))
    return found, Costs(cast, 0.0, seconds(lambda: out.copy_(half)))


def measure_wire(bench: Bench, group: Any = None) -> Wire:
    """Measure the wire between the ranks of a group, all ranks at once."""
    size = dist.get_world_size(group)
    tensors = torch.randn(_TINY, device=bench.device), torch.randn(_LARGE, device=bench.device)
    payloads = [(size - 1) * thinwire.compressor(_PROBE).nbytes(tensor.numel()) for tensor in tensors]
    rings = [ring(tensor.nbytes, size) for tensor in tensors]

    def exchange(tensor: Tensor) -> Taken:
        """Return the wall-clock time of the transfer alone, and the CPU time without that of the codec."""
        transfers: list[float] = []
        taken = bench.both(lambda: transfers.append(_gather(tensor, group).report.seconds["exchange"]))
        return Taken(median(transfers[2:]), taken.processor - bench.both(lambda: _codec(tensor, size)).processor)

    def reduce(tensor: Tensor) -> Taken:
        return bench.both(lambda: dist.all_reduce(tensor, group=group))

    few, many = map(exchange, tensors)
    little, much = map(reduce, tensors)
    return Wire(
        ping(group),
        _slope(much.clock - little.clock, rings),
        _slope(many.clock - few.clock, payloads),
        bench.crowd * _slope(much.processor - little.processor, rings),
        bench.crowd * _slope(many.processor - few.processor, payloads),
    )


def ping(group: Any = None) -> float:
    """Return the seconds that a few bytes take from the first rank of a group to the last; other ranks return 0."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    mine, first, last = dist.get_rank(), ranks[0], ranks[-1]
    if mine not in (first, last):
        return 0.0
    word, taken = torch.zeros(1), []
    for _ in range(_PINGS):
        started = time.perf_counter()
        if mine == first:
            dist.send(word, last, group=group)
            dist.recv(word, last, group=group)
        else:
            dist.recv(word, first, group=group)
            dist.send(word, first, group=group)
        taken.append(time.perf_counter() - started)
    return median(taken) / 2


def _slope(seconds: float, sizes: list[int]) -> float:
    return max(1e-13, seconds / (sizes[1] - sizes[0]))


def _gather(tensor: Tensor, group: Any) -> Handle:
    return thinwire.all_reduce_compressed(tensor.clone(), _PROBE, group=group, algorithm="gather")


def _codec(tensor: Tensor, ranks: int) -> None:
    """Encode and decode as `_gather` does, without the exchange."""
    given, out = thinwire.compressor(_PROBE), tensor.clone()
    sent = given.compress(out)
    given.decompress(sent, out, payloads=sent.payload.expand(ranks, -1).contiguous())
