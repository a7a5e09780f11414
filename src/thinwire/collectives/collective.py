"""What serves an exchange, in one record that optimizers, `attach` and `Synchronizer` take."""

from dataclasses import dataclass
from datetime import timedelta

from ..compressors import Compressor
from ..compressors import compressor as parsed
from .plan import ALGORITHMS, given_max_bytes
from .transport.operation import check_timeout


@dataclass(frozen=True, kw_only=True)
class Collective:
    """How the tensors of a step are exchanged; the same on all ranks.

    algorithm         "gather", "sharded", "dense", "values" (randomk only), or "auto": the one with the fewest bytes.
                      Small tensors use the algorithm that sends the least, or "dense".
    shard_compressor  the compressor of sums, for "sharded"; by default it sends more elements and more bits, as always
                      in the warm-up of an optimizer.
    max_bytes         limit on the memory for the payloads of one step, which are held until it ends; a step that needs
                      more raises an error. By default THINWIRE_MAX_BYTES, or no limit.
    timeout           seconds or a timedelta for one exchange; by default that of the group.

    >>> Collective(algorithm="sharded", shard_compressor="topk:ratio=1/16").shard_compressor.ratio
    Fraction(1, 16)
    """

    algorithm: str = "auto"
    shard_compressor: Compressor | str | None = None
    max_bytes: int | None = None
    timeout: float | timedelta | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm {self.algorithm!r}, expected one of {', '.join(ALGORITHMS)}")
        if self.shard_compressor is not None:
            object.__setattr__(self, "shard_compressor", parsed(self.shard_compressor))
        if self.max_bytes is not None:  # the environment variable is read by who uses this
            given_max_bytes(self.max_bytes)
        check_timeout(self.timeout)


DEFAULT_COLLECTIVE = Collective()
