"""Buckets of a model, and what compression and the handling of bytes cost, as measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.compressors import Compressor, compressor
from thinwire.sync.buckets import BUCKET_BYTES

FIRST_BUCKET_BYTES = 1 << 20
"""Size of DDP's first bucket, which is small so that the exchange begins early. Others are as large as thinwire's."""


def buckets(numel: int, itemsize: int) -> tuple[int, ...]:
    """Return the numel of each bucket of a model, in the order in which the backward pass completes them.

    >>> buckets(10_000_000, itemsize=4)
    (262144, 6553600, 3184256)
    """
    first, full = min(numel, FIRST_BUCKET_BYTES // itemsize), BUCKET_BYTES // itemsize
    whole, rest = divmod(numel - first, full)
    return (first, *[full] * whole, *([rest] if rest else []))


class Costs(NamedTuple):
    """Seconds per element of a tensor."""

    encode: float = 0.0
    commit: float = 0.0  # Second half of compress: write to the residual what is not sent
    write: float = 0.0  # Decode one payload into a tensor
    add: float = 0.0  # Decode one more payload and add it to that tensor

    def decode(self, payloads: int, density: float = 1.0) -> float:
        """Return the seconds per element to decode `payloads` payloads at once.

        Each payload holds `density` times as many elements as the measured one.
        """
        more = self.add * (density * payloads - 1)
        return max(0.0, self.write + more)


@dataclass(frozen=True)
class Speeds:
    """Costs of one rank for codec, bytes and messages, while all other ranks of its node work too."""

    origin: str  # Where the codec was measured, as text for the user
    codecs: Mapping[Compressor, Costs]
    operation: float = 4.5e-4
    """Seconds of a compressed exchange that do not depend on other ranks: hand it to the wire, and apply the result."""
    transfer: float = 8e-4
    message: float = 1.2e-4
    """`transfer` is in seconds per transfer, `message` in seconds per peer of a transfer. Both are the time in which a
    thread sleeps and is woken."""
    round: float = 2.5e-4  # Seconds per message of torch's all-reduce, which waits for the message before it
    ring_byte: float = 0.8e-9
    fp16_byte: float = 1.7e-9
    spread_byte: float = 1.2e-9
    """CPU seconds to send one byte and receive one: in torch's all-reduce, in torch's all-reduce of fp16, which gloo
    sums slowly, and in a compressed exchange. On an accelerator NCCL moves bytes from memory to memory, and these and
    `round` do not count. The defaults were measured with gloo between 2 to 24 ranks on two cores
    of an AMD EPYC, over links of 100 Mbit/s to 10 Gbit/s."""


_PER_CORE = {
    "topk": Costs(encode=0.53e-9, commit=0.58e-9, write=0.20e-9, add=3.8e-9),
    "quantize": Costs(encode=0.43e-9, commit=0.70e-9, write=0.23e-9, add=0.12e-9),
}
"""Costs on one core of an AMD EPYC, by compressor. Here `add` is per element that is sent."""
_ACCELERATOR = {
    "topk": Costs(encode=2.81e-12, commit=2.85e-12, write=0.97e-12, add=64 * 0.0233e-12),
    "quantize": Costs(encode=3.07e-12, commit=2.85e-12, write=3.07e-12, add=3.07e-12),
}
"""Costs on an H200: see docs/gpu.md and benchmarks/results/codec-h200.jsonl. The two halves of quantize's compress, and
its decoding, were not measured. Encode and decode are assumed to be as slow as both halves in one pass, which moves
more bytes. Commit is assumed to cost as much as that of topk."""


def parse_specs(specs: tuple[str, ...]) -> dict[str, Compressor]:
    """Return the compressor of each spec; raise ValueError for an invalid spec, and for one without figures."""
    made = {spec: compressor(spec) for spec in specs or ("",)}
    for spec, given in made.items():
        if given.name not in _PER_CORE:
            raise ValueError(f"--specs {spec}: expected {' or '.join(_PER_CORE)}; dense and 16 bits are always shown")
    return made


def known_speeds(made: Mapping[str, Compressor], cores: int | None) -> Speeds:
    """Return the costs on this number of cores of an AMD EPYC, or on an H200 if it is None."""
    table, factor = (_ACCELERATOR, 1.0) if cores is None else (_PER_CORE, 1 / cores)
    codecs = {one: table[one.name]._replace(add=table[one.name].add * density(one)) for one in made.values()}
    codecs = {one: Costs(*(factor * seconds for seconds in costs)) for one, costs in codecs.items()}
    return Speeds("an H200" if cores is None else f"one core of an AMD EPYC, times {cores}", codecs)


def density(given: Compressor) -> float:
    """Return the share of elements that are sent.

    >>> density(compressor("topk:ratio=1/64,bits=2")), density(compressor("quantize:bits=8"))
    (0.015625, 1.0)
    """
    return float(getattr(given, "ratio", 1.0)) if given.sparse else 1.0
