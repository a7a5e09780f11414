"""Measures the cases and yields their rows."""

from collections.abc import Iterator, Sequence
from itertools import count, cycle, groupby
from math import ceil, lgamma, log
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.compressors import format_spec
from thinwire.kernels.layout import Layout, RandomKLayout, TopKLayout, residual_dtype
from thinwire.tools.bench.measure import Job, interleave, peak_memory

from . import baselines
from .cases import Case
from .check import WEIGHT, Mismatch, check
from .rows import CompressorRow, Row

if TYPE_CHECKING:
    from thinwire.tools.bench.progress import Progress

_SHIFTS, _STRIDE = 8, 1088  # in elements; keeps every gradient aligned to 128 bytes


class Workload:
    """The tensors that all rows of one size and dtype share.

    Gradients are windows of one pool of normal numbers, each shifted against the previous one. The values that an
    element takes in successive gradients are therefore independent, and a new gradient takes no time between two timed
    calls.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        generator = torch.Generator(device).manual_seed(0)
        pool = torch.randn(numel + _SHIFTS * _STRIDE, dtype=dtype, device=device, generator=generator)
        windows = [pool[shift * _STRIDE :][:numel] for shift in range(_SHIFTS + 1)]
        self._first_residual, self._windows = windows[0], cycle(windows[1:])
        self.residual = torch.empty(numel, dtype=residual_dtype(dtype), device=device)
        self.plain_residual = torch.empty_like(self.residual)
        self.out = torch.zeros(numel, dtype=dtype, device=device)
        self.reset()

    def reset(self) -> None:
        """Set the residuals to values that they might have after a step."""
        self.residual.copy_(self._first_residual)
        self.plain_residual.copy_(self._first_residual)

    def gradient(self) -> Tensor:
        """Return the next gradient."""
        return next(self._windows)

    def add(self) -> None:
        """Run the baseline `residual.add_(grad)`."""
        self.plain_residual.add_(self.gradient())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the uncompressed tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def title(self) -> str:
        """Number of elements and dtype, as text."""
        return f"{self.numel:,} x {dtype_name(self.dtype)}"


def count_steps(cases: Sequence[Case]) -> int:
    """Return the number of progress steps: one for each case and one for the baselines of each size and dtype."""
    return len(cases) + len({_tensors(case) for case in cases})


def measure(cases: Sequence[Case], repeats: int, progress: "Progress") -> Iterator[Row]:
    """Yield the rows of the baselines, then those of the compressors, for each size and dtype.

    Raises `Mismatch` with the tensor and the compressor if a result differs from the reference.
    """
    for (numel, dtype, device), group in groupby(cases, _tensors):
        workload = Workload(numel, dtype, device)
        progress.start(f"{workload.title}, plain torch")
        rows = measure_baselines(workload, repeats)
        progress.finish(", ".join(f"{row.label} {row.time.p50:.3g} ms" for row in rows))
        yield from rows
        for case in group:
            title = f"{workload.title}, {case.label}"
            progress.start(title)
            try:
                row = measure_compressor(case, workload, repeats)
            except Mismatch as mismatch:
                raise Mismatch(f"{title}: {mismatch}") from mismatch
            except ValueError as error:  # the options were checked, so this is not an error of the user
                raise RuntimeError(f"{title}: {error}") from error
            progress.finish(f"compress {row.time.p50:.3g} ms = {row.times_add:.3g} x add_, 1/{row.ratio:.4g} of dense")
            yield row


def measure_baselines(workload: Workload, repeats: int) -> list[Row]:
    """Time plain torch on the tensors of a workload and return one row for each baseline."""
    workload.reset()
    k = ceil(workload.numel * baselines.DENSITY)
    jobs: dict[str, Job] = {
        "copy": lambda: workload.out.copy_(workload.gradient()),
        "residual.add_(grad)": workload.add,
        "torch ops, 1/64": lambda: baselines.select(workload.gradient(), workload.plain_residual, k),
        "torch ops per chunk, 1/64": lambda: baselines.select_per_chunk(
            workload.gradient(), workload.plain_residual, baselines.DENSITY
        ),
    }
    times = interleave(jobs, repeats, workload.device)
    return [
        Row(
            label=name,
            numel=workload.numel,
            dtype=dtype_name(workload.dtype),
            device=workload.device.type,
            dense_bytes=workload.dense_bytes,
            time=times[name],
            add=times["residual.add_(grad)"],
            working_bytes=peak_memory(job, workload.device),
        )
        for name, job in jobs.items()
    ]


def measure_compressor(case: Case, workload: Workload, repeats: int) -> CompressorRow:
    """Check a compressor against the reference, time it in turns with its baselines and return its row."""
    workload.reset()
    compressor, keys = case.compressor, count(1)
    layout = compressor.layout(case.numel, case.dtype)
    kept, position_bits, position_bound = positions(layout)
    ct = check(compressor, workload.gradient(), workload.residual, next(keys))

    def compress() -> None:
        nonlocal ct
        ct = compressor.compress(workload.gradient(), workload.residual, key=next(keys), out=ct.payload)

    own: dict[str, Job] = {
        "compress": compress,
        "decompress": lambda: compressor.decompress(ct, workload.out),
        "accumulate": lambda: compressor.accumulate(ct, workload.out, WEIGHT),
    }
    jobs: dict[str, Job] = {"add": workload.add} | own  # torch_ops, the slow one, goes before these
    if kept is not None:
        jobs = {"torch_ops": lambda: baselines.select(workload.gradient(), workload.plain_residual, kept)} | jobs
    times = interleave(jobs, repeats, case.device)
    working = [peak_memory(job, case.device) for job in own.values()]
    return CompressorRow(
        label=case.label,
        numel=case.numel,
        dtype=dtype_name(case.dtype),
        device=case.device.type,
        dense_bytes=workload.dense_bytes,
        time=times["compress"],
        add=times["add"],
        working_bytes=max((each for each in working if each is not None), default=None),
        spec=format_spec(compressor),
        kernels=ct.kernels,
        decompress=times["decompress"],
        accumulate=times["accumulate"],
        torch_ops=times.get("torch_ops"),
        payload_bytes=ct.nbytes,
        frame_bytes=len(ct.to_bytes()),
        kept=kept,
        position_bits=position_bits,
        position_bound=position_bound,
    )


def positions(layout: Layout) -> tuple[int, float, float] | tuple[None, None, None]:
    """Return the number of kept elements, the bits spent on the position of each, and the entropy bound of these bits.

    All three are None if the layout selects nothing.
    """
    if isinstance(layout, RandomKLayout):
        return layout.k, 0.0, _log2_choices(layout.numel, layout.k) / layout.k
    if not isinstance(layout, TopKLayout):
        return None, None, None
    records = [(layout.rows, layout.record)] + ([(1, layout.tail)] if layout.tail else [])
    kept = sum(rows * record.k for rows, record in records)
    bits = sum(rows * 8 * (record.nbytes - record.low_at) for rows, record in records)
    bound = sum(rows * _log2_choices(record.n, record.k) for rows, record in records)
    return kept, bits / kept, bound / kept


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def _log2_choices(n: int, k: int) -> float:
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)


def _tensors(case: Case) -> tuple[int, torch.dtype, torch.device]:
    return case.numel, case.dtype, case.device
