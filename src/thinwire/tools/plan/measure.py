"""Measure the codec, the wire and the training steps of a rank, while all other ranks do the same.

The measurements call the public functions, so that they time the code that will run, and take the median of a few
calls. With one CPU thread, work is measured as CPU time, which other programs do not disturb, times the number of ranks
that share a core. Otherwise it is measured as wall-clock time.

Steps are those of `thinwire bench link` with world size 1: nothing is sent, and no rank waits. The rest is the same as
in training: DDP, its hooks, the optimizer and the codec, which decodes only the rank's own payload.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.collectives.cost import ring
from thinwire.compressors import Compressor
from thinwire.sync.buckets import BUCKET_BYTES
from thinwire.tools.bench.methods import NO_COMMUNICATION, parse
from thinwire.tools.bench.training import Setup, Training, build, take_step
from thinwire.tools.record import cores
from thinwire.tools.units import format_count, parse_count

from .costs import ONE_CORE, Costs, Speeds, known_speeds
from .methods import HALVES, Method

LARGEST = BUCKET_BYTES // 4
REPEATS = 7
_PAYLOADS = 5
_TINY, _LARGE = 1 << 10, 1 << 21
"""Numel of a tensor whose exchange takes only the latency, and of a tensor that shows the rate."""
_PROBE = "quantize:bits=8"
"""Compressor for the measurement of the wire: one byte per element."""
_PINGS = 30
_TURNS, _STEPS = 3, 4
"""Number of turns that count, and of steps in each turn. The turn before them does not count, because DDP rebuilds its
buckets in it, and warm-ups end. All turns together have 16 steps: step 17 would differ, because thinwire.AdamW averages
second moments after step 16."""

T = TypeVar("T", Costs, "Split")
Job = Callable[[], object]
Loss = Callable[[nn.Module], Tensor]
Subject = Callable[[], tuple[nn.Module, Loss]]
"""Function that returns a new model and its loss function at each call."""


@dataclass(frozen=True)
class Bench:
    """Timer for jobs on this rank.

    barrier   function that waits for all ranks.
    crowd     ranks of this node per core, at least 1.
    """

    device: torch.device
    barrier: Job = lambda: None
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
            self.barrier()
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


class Wire(NamedTuple):
    """Latency of a wire, and its costs per byte, in seconds."""

    latency: float
    ring: Taken
    spread: Taken
    """Seconds per byte that a rank sends, to its neighbour in a ring, and to all other ranks; CPU seconds are times
    `Bench.crowd`."""


def measure_codecs(
    made: Iterable[Compressor], bench: Bench, numel: int = LARGEST
) -> tuple[dict[Compressor, Costs], Costs]:
    """Return the costs of each compressor, and those of the cast to 16 bits and back."""
    device = bench.device
    tensors = [torch.randn(numel, device=device) for _ in range(3)]
    gradient, gradients = tensors[0], cycle(tensors)
    out = torch.empty(numel, device=device)

    def seconds(job: Job) -> float:
        return bench.work(job) / numel

    def costs(given: Compressor) -> Costs:
        residual = torch.zeros(numel, device=device)
        key = 1 if given.draws else None
        sent = given.encode(gradient, residual, key=key)
        rows = torch.stack([sent.payload] * _PAYLOADS)
        encode = seconds(lambda: given.encode(next(gradients), residual, key=key))
        commit = seconds(lambda: given.commit(sent, gradient, residual, finite=True))
        one = seconds(lambda: given.decompress(sent, out))
        many = seconds(lambda: given.decompress(sent, out, payloads=rows))
        return Costs(encode=encode, commit=commit, write=one, add=max(0.0, many - one) / (_PAYLOADS - 1))

    found = {given: costs(given) for given in made}
    half = gradient.to(torch.float16)
    cast = seconds(lambda: next(gradients).to(torch.float16).div_(2))
    return found, Costs(cast, 0.0, seconds(lambda: out.copy_(half)))


def measure_wire(bench: Bench) -> Wire:
    """Measure the wire between all ranks, all at once."""
    size = dist.get_world_size()
    tensors = torch.randn(_TINY, device=bench.device), torch.randn(_LARGE, device=bench.device)
    payloads = [(size - 1) * thinwire.compressor(_PROBE).nbytes(tensor.numel()) for tensor in tensors]
    rings = [ring(tensor.nbytes, size) for tensor in tensors]

    def exchange(tensor: Tensor) -> Taken:
        """Return the wall-clock time of the transfer alone, and the CPU time without that of the codec."""
        given, out, transfers = thinwire.compressor(_PROBE), tensor.clone(), list[float]()

        def gather() -> None:
            report = thinwire.all_reduce_compressed(tensor.clone(), given, algorithm="gather").report
            transfers.append(report.seconds["exchange"])

        def encode_and_decode() -> None:
            sent = given.compress(out.copy_(tensor))
            given.decompress(sent, out, payloads=sent.payload.expand(size, -1).contiguous())

        whole, codec = bench.both(gather), bench.both(encode_and_decode)
        return Taken(median(transfers[2:]), whole.processor - codec.processor)

    def reduce(tensor: Tensor) -> Taken:
        return bench.both(lambda: dist.all_reduce(tensor))

    def per_byte(transfer: Callable[[Tensor], Taken], sizes: list[int]) -> Taken:
        few, many = map(transfer, tensors)
        clock, processor = (max(1e-13, (b - a) / (sizes[1] - sizes[0])) for a, b in zip(few, many, strict=True))
        return Taken(clock, bench.crowd * processor)

    spread = per_byte(exchange, payloads)
    return Wire(latency=ping(), ring=per_byte(reduce, rings), spread=spread)


def ping() -> float:
    """Return the seconds that a few bytes take from the first rank to the last; other ranks return 0."""
    mine, last = dist.get_rank(), dist.get_world_size() - 1
    if mine not in (0, last):
        return 0.0
    word, taken = torch.zeros(1), []
    for _ in range(_PINGS):
        started = time.perf_counter()
        if mine == 0:
            dist.send(word, last)
            dist.recv(word, last)
        else:
            dist.recv(word, 0)
            dist.send(word, 0)
        taken.append(time.perf_counter() - started)
    return median(taken) / 2


class Split(NamedTuple):
    """Seconds of the three parts of a step."""

    forward: float
    backward: float
    optimizer: float


class RankCosts(NamedTuple):
    """Measurements of one rank: without communication, and under torchrun with it."""

    codecs: dict[Compressor, Costs]
    halves: Costs
    compute: Split
    """Seconds of a step without communication."""
    more: dict[str, float]
    """Additional seconds of a step of each method, by its name."""
    memory: float = 0.0
    """Bytes of memory of this rank."""
    wire: Wire | None = None


@contextmanager
def process_group(backend: str, **more: Any) -> Iterator[None]:
    """Set up a process group for the duration of the block; `more` goes to `init_process_group`."""
    dist.init_process_group(backend, **more)
    try:
        yield
    finally:
        dist.destroy_process_group()


def alone(backend: str) -> AbstractContextManager[None]:
    """Set up a process group of this rank alone for the duration of a block, so that collectives can be called."""
    return process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def measure_steps(subject: Subject, methods: Iterable[Method], bench: Bench) -> tuple[Split, dict[str, float]]:
    """Return the times of a step without communication, and what each method adds to them, by its name.

    Steps of a method alternate with steps without communication, because the speed of a shared machine changes over
    time.
    """

    def start(name: str) -> tuple[Training, Loss]:
        torch.manual_seed(0)
        model, loss = subject()
        return build(parse(name), Setup(model, lr=1e-5, ddp={"init_sync": False})), loss

    nothings, more = [], {}
    for name in [method.name for method in methods]:
        nothing, mine = (start(each) for each in (NO_COMMUNICATION, name))
        differences = []
        for turn in range(1 + _TURNS):
            both = _burst(*nothing, bench), _burst(*mine, bench)
            if turn:
                nothings.append(both[0])
                differences.append(sum(both[1]) - sum(both[0]))
        more[name] = median(differences)
        del nothing, mine
        gc.collect()  # models and their hooks refer to each other
    return _middle(nothings), more


def combine(
    answers: Sequence[RankCosts], methods: Iterable[Method], *, numel: int, origin: str, crowd: float
) -> tuple[Speeds, Split]:
    """Return the median costs of all ranks, and their median times of a step without communication.

    numel     number of elements of the model.
    origin    where the measurements were made, as text for the user.
    crowd     ranks per core, at least 1. The cost of handling bytes is multiplied by it.
    """
    codecs = {given: _middle([answer.codecs[given] for answer in answers]) for given in answers[0].codecs}
    halves = _middle([answer.halves for answer in answers])
    extras = {}
    for method in methods:  # what the codec does not explain
        costs = codecs[method.compressor] if method.compressor is not None else Costs()
        costs = halves if method.name in HALVES else costs
        added = median(answer.more[method.name] for answer in answers) / numel
        more = added - costs.encode - costs.commit - costs.write
        extras[method.name] = max(0.0, more) if method.compressor is None else more  # only an optimizer can save time
    # `operation` is 0: the steps of a rank alone already include the cost of an exchange apart from its transfers.
    slower = replace(ONE_CORE, origin=origin, operation=0.0).slower(crowd)
    compute = _middle([answer.compute for answer in answers])
    return replace(slower, codecs=codecs, halves=halves, extras=extras), compute


def speeds_of(codec: str, specs: Mapping[str, Compressor], on_cores: int | None) -> Speeds:
    """Return the costs for the option `--codec`, on this number of cores, or on an accelerator if it is None."""
    made = list(specs.values())
    base = known_speeds(made, on_gpu=codec == "auto" and on_cores is None)
    if codec == "auto":
        return base if on_cores is None else base.faster(on_cores, f"{base.origin}, times {on_cores}")
    base = base if on_cores else base.by_accelerator()
    if codec != "here":
        wanted = parse_count("--codec", codec, 1e15)
        first = next(iter(base.codecs.values()), None)
        factor = wanted * (first.encode + first.commit) if first else 1.0
        origin = f"{format_count(wanted)} elements of {next(iter(specs), '')} per second, as given"
        return base.faster(factor, origin)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if on_cores is None and device.type == "cpu":
        raise ValueError(
            "--codec here measures this machine's CPU, but the ranks have no cores: give --cores 16, or elements per "
            "second, such as --codec 20e9"
        )
    count = cores() if on_cores is None else max(1, min(cores(), on_cores))
    before = torch.get_num_threads()
    torch.set_num_threads(count)  # thinwire's kernels use as many
    try:
        codecs, halves = measure_codecs(made, Bench(device))
    finally:
        torch.set_num_threads(before)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{count} thread(s)"
    return replace(base, origin=f"measured here, {name}", codecs=codecs, halves=halves)


def _burst(made: Training, loss: Loss, bench: Bench) -> Split:
    """Return the median times of a few steps.

    The first step does not count, because the other method ran before it and changed the state of memory and caches.
    """
    marks = [take_step(made, loss, bench.now) for _ in range(_STEPS)]
    return _middle([Split(*(end - begin for begin, end in pairwise(each))) for each in marks[1:]])


def _middle(found: Sequence[T]) -> T:
    return type(found[0])(*map(median, zip(*found, strict=True)))
