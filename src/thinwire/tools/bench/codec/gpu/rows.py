"""What is reported: one row for each thing that was timed."""

from dataclasses import asdict, dataclass

from thinwire.tools.bench.measure import Timing


@dataclass(frozen=True)
class Row:
    """A call on tensors of one size, beside what its bytes take at best."""

    name: str
    numel: int
    dtype: str
    """Of the gradient; the residual is float32 (float64 for float64)."""
    entry_bytes: float
    """Bytes an entry that must be moved, each read or written once."""
    time: Timing
    graph: bool
    """Captured into a CUDA graph; else Python's part shows in what is short."""
    floor: float | None = None
    """Milliseconds: its bytes at the speed of the float32 `residual.add_(grad)`; for decoding, writing them once."""
    torch_floor: float | None = None
    """Its bytes at the speed of torch's `residual.add_(grad)` of these very dtypes."""
    torch_ops: Timing | None = None
    """The same selection by add, topk, gather, a cast to float16, and clear."""
    torch_topk: Timing | None = None
    """`torch.topk` alone of as many."""
    kernel: str = "torch"
    """The module that did it."""
    payload_bytes: int | None = None
    working_bytes: int | None = None
    """Peak beyond tensor, residual and payload, where it was measured."""

    @property
    def gb_per_s(self) -> float:
        return self.entry_bytes * self.numel / self.time.p50 / 1e6

    @property
    def of_floor(self) -> float | None:
        return None if self.floor is None else self.floor / self.time.p50

    @property
    def of_torch_floor(self) -> float | None:
        return None if self.torch_floor is None else self.torch_floor / self.time.p50

    @property
    def speedup(self) -> float | None:
        return None if self.torch_ops is None else self.torch_ops.p50 / self.time.p50

    def record(self) -> dict[str, object]:
        """As a line of JSON."""
        return {
            "kind": "gpu",
            "name": self.name,
            "numel": self.numel,
            "dtype": self.dtype,
            "entry_bytes": self.entry_bytes,
            "ms": asdict(self.time),
            "gb_per_s": self.gb_per_s,
            "graph": self.graph,
            "floor_ms": self.floor,
            "of_floor": self.of_floor,
            "torch_floor_ms": self.torch_floor,
            "of_torch_floor": self.of_torch_floor,
            "torch_ops_ms": None if self.torch_ops is None else asdict(self.torch_ops),
            "torch_topk_ms": None if self.torch_topk is None else asdict(self.torch_topk),
            "speedup_over_torch_ops": self.speedup,
            "kernel": self.kernel,
            "payload_bytes": self.payload_bytes,
            "working_bytes": self.working_bytes,
        }
