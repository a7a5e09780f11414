"""The reported row: one for each timed call."""

from dataclasses import asdict, dataclass

from thinwire.tools.bench.measure import Timing


@dataclass(frozen=True)
class Row:
    """The time of a call on tensors of one size, and the least time that its bytes need."""

    name: str
    numel: int
    dtype: str
    """Dtype of the gradient. The residual is float32, or float64 for float64."""
    entry_bytes: float
    """Bytes per element that must be moved, with each read and each write counted once."""
    time: Timing
    graph: bool
    """Whether the call was captured into a CUDA graph. Otherwise the time of a short call includes Python."""
    floor: float | None = None
    """Milliseconds that the bytes take at the speed of the float32 `residual.add_(grad)`.

    For decoding, the milliseconds to write the result once.
    """
    torch_floor: float | None = None
    """Milliseconds that the bytes take at the speed of `residual.add_(grad)` in the measured dtypes."""
    torch_ops: Timing | None = None
    """Time of the same selection in torch: add, topk, gather, a cast to float16, and clear."""
    torch_topk: Timing | None = None
    """Time of `torch.topk` alone for the same number of elements."""
    kernel: str = "torch"
    """Name of the kernel module, or "torch"."""
    payload_bytes: int | None = None
    working_bytes: int | None = None
    """Peak memory beyond tensor, residual and payload. None if it was not measured."""

    @property
    def gb_per_s(self) -> float:
        """Throughput in GB/s: bytes that must be moved over the median time."""
        return self.entry_bytes * self.numel / self.time.p50 / 1e6

    @property
    def of_floor(self) -> float | None:
        """`floor` divided by the median time. 1 means that the kernel is as fast as the floor."""
        return None if self.floor is None else self.floor / self.time.p50

    @property
    def of_torch_floor(self) -> float | None:
        """`torch_floor` divided by the median time."""
        return None if self.torch_floor is None else self.torch_floor / self.time.p50

    @property
    def speedup(self) -> float | None:
        """Time of the same selection in torch operations divided by the median time."""
        return None if self.torch_ops is None else self.torch_ops.p50 / self.time.p50

    def record(self) -> dict[str, object]:
        """Return the row as a dict for one line of JSON."""
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
