"""What compression and the handling of bytes cost a rank: measured elsewhere (the tables here), or where it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from thinwire.compressors import Compressor


@dataclass(frozen=True)
class Costs:
    """Seconds for each entry of a tensor."""

    encode: float
    commit: float
    """The second half of compress: what is kept is written to the residual."""
    write: float
    """Decode one payload into a tensor."""
    add: float = 0.0
    """Decode one more on top of it."""

    def times(self, factor: float) -> "Costs":
        return Costs(factor * self.encode, factor * self.commit, factor * self.write, factor * self.add)

    def decode(self, payloads: int, density: float = 1.0) -> float:
        """Of so many payloads at once, with `density` times the entries that were measured."""
        more = self.add * (density * payloads - 1)
        return max(0.0, self.write + more)


@dataclass(frozen=True)
class Speeds:
    """Of one rank, while all others of its host work too."""

    origin: str
    """Where they were measured, for a person."""
    codecs: MappingProxyType[str, Costs]
    """By spec, as it was given."""
    halves: Costs
    """To 16 bits and back."""
    operation: float
    """Seconds for an exchange of thinwire's that a rank alone has too: handing it to the wire, and applying it."""
    transfer: float
    message: float
    """Seconds for each transfer of it, and for each peer of that: a thread that sleeps and is woken."""
    round: float
    """Seconds for each message of torch's all-reduce, which waits for the one before."""
    ring_byte: float
    fp16_byte: float
    spread_byte: float
    """Seconds to send a byte and to receive one: in torch's all-reduce, in that of fp16, which gloo adds up slowly, and
    in an exchange of thinwire's."""
    extras: MappingProxyType[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Seconds for each entry that a step takes more than the codec explains, by `Way.name`: another optimizer, and
    memory that is in no cache any more. Where they were not measured, none."""

    def faster(self, factor: float, origin: str) -> "Speeds":
        """With a codec that is so many times as quick; bytes and messages cost what they did."""
        codecs = {spec: costs.times(1 / factor) for spec, costs in self.codecs.items()}
        return replace(self, origin=origin, codecs=MappingProxyType(codecs), halves=self.halves.times(1 / factor))

    def slower(self, factor: float) -> "Speeds":
        """Everything so many times as slow: a processor that had less time for it."""
        made = self.faster(1 / factor, self.origin)
        extras = MappingProxyType({name: factor * value for name, value in self.extras.items()})
        names = ("operation", "transfer", "message", "round", "ring_byte", "fp16_byte", "spread_byte")
        return replace(made, extras=extras, **{name: factor * getattr(self, name) for name in names})

    def by_accelerator(self) -> "Speeds":
        """Bytes cost no processor's time, and the rounds of an all-reduce neither: NCCL's go from memory to memory."""
        origin = f"{self.origin}; messages as measured with gloo"
        return replace(self, origin=origin, round=0.0, ring_byte=0.0, fp16_byte=0.0, spread_byte=0.0)


KINDS = ("quantize", "topk", "randomk")
PER_CORE = {
    "topk": Costs(encode=0.53e-9, commit=0.58e-9, write=0.20e-9, add=3.8e-9),
    "randomk": Costs(encode=0.38e-9, commit=0.57e-9, write=0.24e-9),
    "quantize": Costs(encode=0.43e-9, commit=0.70e-9, write=0.23e-9, add=0.12e-9),
}
"""One core, by kind; `add` is for each entry that was kept. `thinwire plan --codec here` measures where it runs."""
ACCELERATOR = {
    "topk": Costs(encode=2.81e-12, commit=2.85e-12, write=0.97e-12, add=64 * 0.0233e-12),
    "quantize": Costs(encode=3.07e-12, commit=2.85e-12, write=3.07e-12, add=3.07e-12),
}
"""An H200: docs/gpu.md, benchmarks/results/codec-h200.jsonl. The halves of quantize's compress, and its decoding, were
not measured: encoding and decoding are taken to be as slow as both halves in one pass, which moves more bytes, and the
second half as topk's."""
_CORE_NAME, _ACCELERATOR_NAME = "as measured on one core of an AMD EPYC", "as measured on an H200"
_HALVES_PER_CORE, _HALVES_ACCELERATOR = Costs(0.34e-9, 0.0, 0.21e-9), Costs(2.9e-12, 0.0, 2.9e-12)
"""On an accelerator a copy from float32 to float32, which moves more."""
OPERATION, TRANSFER, MESSAGE, ROUND = 4.5e-4, 8e-4, 1.2e-4, 2.5e-4
"""Of one core of that machine, with gloo between 2 to 24 ranks on two of them."""
RING_BYTE, FP16_BYTE, SPREAD_BYTE = 0.8e-9, 1.7e-9, 1.2e-9
"""Work for a byte that is sent and one that is received, over the links of `thinwire bench link`."""


def per_core(made: Mapping[str, Compressor]) -> Speeds:
    """One core of the machine that the table was made on."""
    return _of_table(PER_CORE, made, _CORE_NAME, _HALVES_PER_CORE)


def accelerator(made: Mapping[str, Compressor]) -> Speeds:
    return _of_table(ACCELERATOR, made, _ACCELERATOR_NAME, _HALVES_ACCELERATOR).by_accelerator()


def _of_table(table: Mapping[str, Costs], made: Mapping[str, Compressor], origin: str, halves: Costs) -> Speeds:
    codecs = {}
    for spec, given in made.items():
        if given.name not in table:
            raise ValueError(
                f"--specs {spec}: there is no figure for {given.name} {origin}; expected one of {', '.join(table)}, or "
                "a speed, such as --codec 20e9"
            )
        costs = table[given.name]
        codecs[spec] = replace(costs, add=costs.add * density(given))
    return Speeds(
        origin, MappingProxyType(codecs), halves, OPERATION, TRANSFER, MESSAGE, ROUND, RING_BYTE, FP16_BYTE, SPREAD_BYTE
    )  # fmt: skip


def density(given: Compressor) -> float:
    """The share of entries that are sent.

    >>> from thinwire.compressors import compressor
    >>> density(compressor("topk:ratio=1/64,bits=2")), density(compressor("quantize:bits=8"))
    (0.015625, 1.0)
    """
    return float(getattr(given, "ratio", 1.0)) if given.sparse else 1.0
