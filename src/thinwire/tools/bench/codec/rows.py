"""The reported rows: one for each baseline or compressor, size and dtype."""

from dataclasses import asdict, dataclass

from thinwire.tools.bench.measure import Timing


@dataclass(frozen=True)
class Row:
    """A timed job on tensors of one size, and `residual.add_(grad)` on tensors of the same size."""

    label: str
    numel: int
    dtype: str
    device: str
    dense_bytes: int
    time: Timing
    """Time of the baseline, or of compress."""
    add: Timing
    """Time of `residual.add_(grad)`, measured in turns with the job."""
    working_bytes: int | None
    """Peak memory beyond the tensor, its residual and the result. None if it could not be measured."""

    @property
    def times_add(self) -> float:
        """Time of the job divided by that of `residual.add_(grad)`."""
        return self.time.p50 / self.add.p50

    @property
    def working_share(self) -> float | None:
        """`working_bytes` as a share of the uncompressed tensor."""
        return None if self.working_bytes is None else self.working_bytes / self.dense_bytes

    def record(self) -> dict[str, object]:
        """Return the row as a dict for one line of JSON."""
        return {
            "kind": "baseline",
            "name": self.label,
            "numel": self.numel,
            "dtype": self.dtype,
            "device": self.device,
            "dense_bytes": self.dense_bytes,
            "ms": asdict(self.time),
            "gb_per_s": self.time.gb_per_s(self.dense_bytes),
            "add_ms": asdict(self.add),
            "times_add": self.times_add,
            "working_bytes": self.working_bytes,
            "working_share": self.working_share,
        }


@dataclass(frozen=True)
class CompressorRow(Row):
    """The row of a compressor. `time` is the time of compress, with the update of the residual."""

    spec: str
    kernels: str
    decompress: Timing
    accumulate: Timing
    torch_ops: Timing | None
    """Time of the same selection in torch operations. None for a compressor that selects nothing."""
    payload_bytes: int
    frame_bytes: int
    kept: int | None
    position_bits: float | None
    """Bits spent on the position of each kept element.

    `position_bound` is the entropy of a choice of k out of n for each kept element, log2 C(n, k) / k.
    """
    position_bound: float | None

    @property
    def ratio(self) -> float:
        """Bytes of the uncompressed tensor divided by those of the payload."""
        return self.dense_bytes / self.payload_bytes

    @property
    def frame_ratio(self) -> float:
        """Bytes of the uncompressed tensor divided by those of the payload with its frame header."""
        return self.dense_bytes / self.frame_bytes

    @property
    def accumulate_times_add(self) -> float:
        """Time of accumulate divided by that of `residual.add_(grad)`."""
        return self.accumulate.p50 / self.add.p50

    @property
    def speedup(self) -> float | None:
        """Time of the same selection in torch operations divided by that of compress. None if nothing is selected."""
        return None if self.torch_ops is None else self.torch_ops.p50 / self.time.p50

    def record(self) -> dict[str, object]:
        """Return the row as a dict for one line of JSON."""
        timings = {"compress": self.time, "decompress": self.decompress, "accumulate": self.accumulate}
        return {
            "kind": "codec",
            "spec": self.spec,
            "label": self.label,
            "numel": self.numel,
            "dtype": self.dtype,
            "device": self.device,
            "kernels": self.kernels,
            **{f"{name}_ms": asdict(timing) for name, timing in timings.items()},
            **{f"{name}_gb_per_s": timing.gb_per_s(self.dense_bytes) for name, timing in timings.items()},
            "add_ms": asdict(self.add),
            "torch_ops_ms": None if self.torch_ops is None else asdict(self.torch_ops),
            "compress_times_add": self.times_add,
            "accumulate_times_add": self.accumulate_times_add,
            "speedup_over_torch_ops": self.speedup,
            "dense_bytes": self.dense_bytes,
            "payload_bytes": self.payload_bytes,
            "frame_bytes": self.frame_bytes,
            "ratio": self.ratio,
            "frame_ratio": self.frame_ratio,
            "kept": self.kept,
            "position_bits": self.position_bits,
            "position_bound": self.position_bound,
            "working_bytes": self.working_bytes,
            "working_share": self.working_share,
        }
