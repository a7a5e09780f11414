"""Plan with a model that is measured: by every rank of torchrun, with its links, or by this process alone."""

import os
import runpy
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from math import sqrt
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.tools.record import cores
from thinwire.tools.train.control import pick_backend, pick_device
from thinwire.tools.train.models import VOCABULARY, GPTConfig, ModelConfig, model_config
from thinwire.tools.train.place import Place

from .cluster import Cluster
from .costs import Speeds, Work, of_sizes, parse_specs
from .measure import (
    LARGEST,
    Bench,
    Loss,
    RankCosts,
    Subject,
    alone,
    combine,
    measure_codecs,
    measure_steps,
    measure_wire,
    process_group,
)
from .methods import methods_for
from .model import Case
from .options import Options, missing_options, parse_cluster, refuse_others
from .show import show

_TIMEOUT = timedelta(seconds=300)
_CONSEQUENCE_SECONDS = 15.0
_BATCH = 32
"""Samples per rank and step for models of thinwire train; the same as its default."""


def plan_measured(options: Options) -> int:
    """Measure the model and the codec, print the plan, and return 0; raise ValueError if something cannot be measured.

    Under torchrun all ranks measure, their links too, and rank 0 prints. Other ranks wait before they raise, so that
    rank 0 alone reports an error that all ranks have. Without torchrun this process measures, the plan is for ranks
    that are like it, and the options give the links.
    """
    torchrun = Place.of_torchrun()
    place = torchrun or Place(rank=0, world_size=1, local_rank=0, local_world_size=1)
    try:
        given = _given_cluster(options, torchrun)
        made = parse_specs(options.specs)
        device = pick_device("cuda" if torch.cuda.is_available() else "cpu", place.local_rank)
        subject = load_subject(str(options.model), device)
        sizes, dtype = _gradients(subject)
    except (ValueError, OSError) as error:
        if place.rank == 0:
            raise
        time.sleep(_CONSEQUENCE_SECONDS)  # if rank 0 fails too, torchrun ends this rank in the meantime
        raise ValueError(f"rank {place.rank} of {place.world_size}: {error}") from None
    on_gpu, threads = device.type == "cuda", place.local_world_size * torch.get_num_threads()
    backend = pick_backend(device, place.local_world_size)
    methods, buckets = methods_for(made, nccl=on_gpu, dtype=dtype), of_sizes(sizes, dtype)
    bench, largest = Bench(device, crowd=max(1.0, threads / cores())), max(bucket.numel for bucket in buckets)
    with alone(backend):
        steps = measure_steps(subject, methods, bench)

    def costs(bench: Bench) -> RankCosts:
        return RankCosts(*measure_codecs(made.values(), bench, min(LARGEST, largest)), *steps)

    if given is not None:
        answers = [costs(bench)]
    else:
        with process_group(backend, timeout=_TIMEOUT):
            bench = replace(bench, barrier=dist.barrier)
            mine = costs(bench)._replace(wire=measure_wire(bench), memory=_memory(device, place))
            answers = [mine] * place.world_size
            dist.all_gather_object(answers, mine)
    if place.rank != 0:
        return 0
    name = torch.cuda.get_device_name(device) if on_gpu else f"{torch.get_num_threads()} thread(s)"
    origin = f"measured here, {name}{' per rank' if torchrun else ''}"
    speeds, compute = combine(answers, methods, numel=sum(sizes), origin=origin, crowd=bench.crowd)
    if given is None:
        cluster, speeds = _measured_cluster(answers, speeds, on_gpu)
    else:
        cluster, speeds = given, speeds.by_accelerator() if on_gpu else speeds
    slows = 0.0 if on_gpu else max(0.0, min(1.0, 2 - cores() / threads))
    cluster = replace(cluster, codec_slows=slows, wire_slows=slows, nccl=on_gpu)
    work = Work(buckets, *compute, dtype=dtype)
    show(Case(work, cluster, speeds, origin="measured" if torchrun else "measured here"), made, options.plot)
    sys.stdout.flush()
    return 0


def _gradients(subject: Subject) -> tuple[list[int], torch.dtype]:
    """Return the numel of each trainable parameter of a model, and the dtype that most elements have."""
    trained = [parameter for parameter in subject()[0].parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("the model of --model has no parameter that requires a gradient")
    numels: dict[torch.dtype, int] = {}
    for parameter in trained:
        numels[parameter.dtype] = numels.get(parameter.dtype, 0) + parameter.numel()
    return [parameter.numel() for parameter in trained], max(numels, key=numels.__getitem__)


def _measured_cluster(answers: Sequence[RankCosts], speeds: Speeds, on_gpu: bool) -> tuple[Cluster, Speeds]:
    """Return the cluster by the answers of all ranks, and `speeds` with the costs of the bytes that they sent.

    All ranks measured their links at the same time, so the rates are those of ranks that may share a node's link.
    """
    wires = [answer.wire for answer in answers if answer.wire is not None]
    ring, spread = median(wire.ring.clock for wire in wires), median(wire.spread.clock for wire in wires)
    ring_work = min(ring, median(wire.ring.processor for wire in wires))
    spread_work = min(spread, median(wire.spread.processor for wire in wires))
    ring_link, spread_link = _link(ring, ring_work), _link(spread, spread_work)
    cluster = Cluster(
        world=len(answers),
        rate=8 / ring_link,
        latency=max(wire.latency for wire in wires),
        peer_share=1.0,
        spread_share=ring_link / spread_link,
        memory=min(answer.memory for answer in answers),
    )
    fp16 = 0.0 if on_gpu else max(ring_work, speeds.fp16_byte - speeds.ring_byte + ring_work)
    return cluster, replace(speeds, ring_byte=ring_work, fp16_byte=fp16, spread_byte=spread_work)


def _link(byte: float, work: float) -> float:
    """Return the seconds per byte of the link alone: the inverse of `Cluster.wire_seconds`."""
    return sqrt(max(byte**2 - work**2, (0.1 * byte) ** 2))


def _memory(device: torch.device, place: Place) -> float:
    """Return the memory of this rank: of its GPU, or its share of the node's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / place.local_world_size


def _given_cluster(options: Options, torchrun: Place | None) -> Cluster | None:
    """Check the options, and return the cluster that they give; None under torchrun, where it is measured."""
    if torchrun is None:
        allowed = {"model", "specs", "plot", "world", "bandwidth", "latency", "gpu_memory"}
        refuse_others(options, allowed, "with --model it is measured on this machine")
        missing = missing_options(options, ("world", "bandwidth"))
        if missing:
            raise ValueError(
                f"{', '.join(missing)} not given: expected such as --model {options.model} --world 16 --bandwidth "
                "1Gbps; or measure links too: torchrun ... -m thinwire plan --model ..."
            )
        return parse_cluster(options)
    refuse_others(options, {"model", "specs", "plot"}, "under torchrun it is measured")
    if options.model is None:
        raise ValueError(
            "--model not given, expected one of thinwire train's, such as gpt:layers=4,width=256, or FILE.py:FUNCTION"
        )
    if torchrun.world_size < 2:
        raise ValueError(
            "torchrun started one rank, which has nobody to exchange with: expected --nproc-per-node 2 or more, or "
            "several --nnodes"
        )
    return None


def load_subject(text: str, device: torch.device) -> Subject:
    """Return a function that builds the model and its loss; raise ValueError if `text` names no model."""
    path, _, function = text.rpartition(":")
    if path.endswith(".py"):
        return _of_file(Path(path), function, text, device)
    config = model_config(text)
    return lambda: (config.build(0).to(device), _loss(config, device))


def _loss(config: ModelConfig, device: torch.device) -> Loss:
    if isinstance(config, GPTConfig):
        inputs = torch.randint(VOCABULARY, (_BATCH, config.context), device=device)
        classes, shape = VOCABULARY, inputs.shape
    else:
        inputs = torch.randn(_BATCH, *config.inputs, device=device)
        classes, shape = config.classes, inputs.shape[:1]
    targets = torch.randint(classes, shape, device=device)

    def loss(module: nn.Module) -> Tensor:
        return F.cross_entropy(module(inputs).flatten(0, -2), targets.flatten())

    return loss


def _of_file(path: Path, function: str, text: str, device: torch.device) -> Subject:
    if not path.is_file():
        raise ValueError(f"--model {text}: there is no file {path}, expected FILE.py:FUNCTION")
    make = runpy.run_path(str(path), run_name=path.stem).get(function)
    if not callable(make):
        raise ValueError(f"--model {text}: {path} has no function {function!r}, expected FILE.py:FUNCTION")

    def subject() -> tuple[nn.Module, Loss]:
        made = make()
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module) or not callable(made[1]):
            raise ValueError(
                f"--model {text} returned {type(made).__name__}, expected (module, loss), where loss(module) is a "
                "tensor to call backward() on"
            )
        return made[0].to(device), made[1]

    return subject
