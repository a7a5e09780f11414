"""The methods that are compared, and what each computes and sends for a bucket.

A method is DDP's all-reduce with 32 or 16 bits, or a compressor of thinwire with the algorithm that the library
chooses. A compressed exchange consists of a few phases, one after the other: compute, transfer, compute, transfer. The
work after its last transfer (residual and result) waits until all buckets of the step have been exchanged. Casts to 16
bits take no time, and biases and norms, which thinwire sends in 8 bits, are compressed like all other parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, hypot, log2
from typing import NamedTuple

import torch

from thinwire.collectives import cost
from thinwire.collectives.plan import choose
from thinwire.compressors import Compressor

from .costs import Speeds, density
from .options import Cluster

DENSE, BF16, FP16 = "dense", "bf16", "fp16 hook"  # DDP's own all-reduce, and DDP with a hook that sends 16 bits
HALVES = (BF16, FP16)
_SPREAD_SHARE = 0.84
"""Bytes per second on a link if each rank sends to several peers, so that several flows share it, relative to one."""


@dataclass(frozen=True)
class Method:
    """A method to train: its name, and its compressor, or None if torch's DDP sends."""

    name: str
    compressor: Compressor | None = None

    def algorithm(self, numel: int, world: int, dtype: torch.dtype = torch.float32) -> str:
        """Return the algorithm by which the library reduces a slice of this size, for the fewest bytes."""
        given = self.compressor
        if given is None:
            return "ring"
        return choose("auto", given, given.for_sum(world), numel, dtype, ranks=world, can_shard=True)[0]


def methods_for(made: Mapping[str, Compressor], cluster: Cluster, dtype: torch.dtype, shard: int = 1) -> list[Method]:
    """Return the methods to compare, the simplest first: dense, 16 bits, then each compressor as it is best used."""
    # torch's hook for bf16 requires NCCL, and FSDP has nothing in place of the one for fp16. Gradients of 16 bits are
    # dense already.
    halves = [] if dtype.itemsize < 4 else [BF16] if cluster.cores is None else [FP16] if shard == 1 else []
    ours = [Method(f"{'thinwire.AdamW' if one.sparse else 'attach'} {spec}", one) for spec, one in made.items()]
    return [*map(Method, (DENSE, *halves)), *sorted(ours, key=lambda one: one.name.startswith("thinwire."))]


class Transfer(NamedTuple):
    """Phase in which ranks exchange bytes."""

    busy: float  # Seconds in which the wire is busy
    beyond: float  # Seconds from then until all has arrived
    handling: float  # CPU seconds of each rank


class Exchange(NamedTuple):
    """One exchange: its phases, its bytes, messages and memory, and the work that remains after its phases."""

    phases: tuple[float | Transfer, ...]  # Seconds in which the rank computes, or a transfer
    cost: cost.Cost
    apply: float = 0.0  # Seconds to write residual and result, after all buckets have been exchanged


def _transfer(cluster: Cluster, share: float, nbytes: float, rounds: int, handling: float) -> Transfer:
    """Return the transfer of bytes over links, of whose rate this share is used.

    Bytes are handled while others travel, but a pipeline of few segments does not fully overlap the two. The time is
    modelled as sqrt(link² + handling²): 1.4 times as long as either if both are equal. On an accelerator, each exchange
    has a CPU of its own for the handling, and the wire is free for others in the meantime.

    rounds   number of messages that wait for each other.
    """
    link = 8 * nbytes / (share * cluster.share * cluster.rate)
    whole, latency = hypot(link, handling), rounds * cluster.latency
    busy = link if cluster.cores is None else whole
    return Transfer(busy, whole - busy + latency, handling)


def _ring(method: Method, numel: int, cluster: Cluster, speeds: Speeds, dtype: torch.dtype) -> Exchange:
    rounds = 2 * (cluster.world - 1)
    if cluster.cores is None:  # NCCL may use trees
        rounds = min(rounds, 2 * ceil(log2(cluster.world)))
    nbytes = cost.ring(numel * (2 if method.name in HALVES else dtype.itemsize), cluster.world)
    byte = speeds.fp16_byte if method.name == FP16 else speeds.ring_byte
    cpu = 0.0 if cluster.cores is None else byte * nbytes + speeds.round * rounds
    return Exchange(
        (_transfer(cluster, 1.0, nbytes, rounds, cpu),), cost.Cost(nbytes, messages=2 * (cluster.world - 1), memory=0)
    )


def exchange(method: Method, numel: int, cluster: Cluster, speeds: Speeds, dtype: torch.dtype) -> Exchange:
    """Return the exchange of a bucket: see collectives/algorithms."""
    given = method.compressor
    if given is None:
        return _ring(method, numel, cluster, speeds, dtype)
    world, costs, second = cluster.world, speeds.codecs[given], given.for_sum(cluster.world)
    algorithm = method.algorithm(numel, world, dtype)
    used = cost.of(algorithm, first=given, second=second, numel=numel, dtype=dtype, ranks=world)

    def transfer(nbytes: float) -> Transfer:
        cpu = speeds.transfer + speeds.message * (world - 1)
        cpu += 0.0 if cluster.cores is None else speeds.spread_byte * nbytes
        return _transfer(cluster, 1.0 if world == 2 else _SPREAD_SHARE, nbytes, 1, cpu)

    begin = speeds.operation + costs.encode * numel
    if algorithm == "gather":
        return Exchange((begin, transfer(used.sent)), used, (costs.commit + costs.decode(world)) * numel)
    if algorithm == "dense":  # so few elements that compression would not pay off
        return Exchange((speeds.operation, transfer(used.sent / 2), transfer(used.sent / 2)), used)
    assert algorithm == "sharded", algorithm
    pieces, share = given.nbytes(numel, dtype) * (world - 1) / world, numel / world
    again = (costs.decode(world) + costs.encode) * share
    denser = density(second) / density(given)
    apply = costs.commit * (numel + share) + costs.decode(1, denser) * numel
    return Exchange((begin, transfer(pieces), again, transfer(used.sent - pieces)), used, apply)
