"""Measures the rows of one size and dtype: plain torch, every compressor in all its parts, and Adam's update.

The *floor* of a call is the time that its bytes take at the speed of the float32 `residual.add_(grad)` of the same run;
for decoding it is the time to write the result once. In other dtypes that addition would be too easy a floor: torch
adds bfloat16 to float32 at two thirds of the memory bandwidth of an H200. The share of it is reported as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from math import ceil
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors import Compressor
from thinwire.kernels.layout import Layout, RandomKLayout, TopKLayout, residual_dtype
from thinwire.kernels.updates import AdamUpdate

from ..harness import Failure, Progress, Row
from ..measure import Call, Clock, Timing
from .cases import Case
from .check import ELEMENTS, PAYLOADS, check, check_update, compress

SETS = 3
"""Sets of buffers on a GPU, on which calls take turns, so that none finds its data in the cache."""
KEPT = 0.3
"""Standard deviation of the residuals. That of the gradients is 1."""
WIDE_ADD = 12
"""Bytes per element of the float32 addition: two reads and a write."""
CHUNK, DENSITY = 4096, 1 / 64
"""Chunk and share of the elements of the baseline that selects by chunks."""
ADD, WIDE, ZERO = "residual.add_(grad)", "the same in float32", "out.zero_()"
TOPK, SELECT = "torch.topk", "torch: add topk gather fp16 clear"
WRITE, ADVANCE = "write Adam's update", "advance Adam's moments and the residual"
_WINDOWS, _STRIDE = 8, 1088  # in elements; keeps every gradient aligned to 128 bytes


@dataclass(frozen=True)
class Timed:
    """A call to time, and what its row says besides the time."""

    name: str
    moved: float
    """Bytes per element that must be moved, with each read and each write counted once."""
    call: Call
    graph: bool = True
    """Whether a CUDA graph can hold the call. Otherwise the time of a short call includes Python."""
    share: str = ""
    """The share of elements that torch selects in the calls that this one is compared with."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further fields of the row of a call of thinwire. Those of torch have none."""


class Bench:
    """Measures calls on tensors of one size and dtype.

    Calls take turns on sets of gradients, residuals and results. On a GPU there are `SETS` of each. On a CPU, gradients
    are windows of one pool of normal numbers, each shifted against the previous one: the values that an element takes
    in successive calls are independent, and a new gradient takes no time. They share one residual, which is what error
    feedback leaves of them.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, clock: Clock, samples: int) -> None:
        self.numel, self.dtype, self.device, self._clock, self._samples = numel, dtype, device, clock, samples
        self._generator = torch.Generator(device).manual_seed(0)
        if device.type == "cuda":
            self.sets = SETS
            self.gradients = self.new(dtype)
        else:
            self.sets = _WINDOWS
            pool = torch.randn(numel + _WINDOWS * _STRIDE, dtype=dtype, device=device, generator=self._generator)
            self.gradients = [pool[window * _STRIDE :][:numel] for window in range(_WINDOWS)]
        self.residuals, self.outs = self.new(residual_dtype(dtype), KEPT), self.new(residual_dtype(dtype))
        self.read, self.width = dtype.itemsize, residual_dtype(dtype).itemsize
        """Bytes of an element of a gradient and of a residual."""
        gradients, residuals = self.gradients, self.residuals
        self._add = Timed(ADD, self.read + 2 * self.width, lambda i: residuals[i].add_(gradients[i], alpha=1e-3))
        self._wide_add = self._zero = 0.0

    def new(self, dtype: torch.dtype, size: float = 1.0) -> list[Tensor]:
        """Return one more random tensor for each set, on a CPU the same for all. `size` is the standard deviation."""
        made = self._empty(self.numel, dtype=dtype)
        self._draw(made, size)
        return made

    def payloads(self, layout: Layout, count: int = 1) -> list[Tensor]:
        """Return an uninitialized tensor with room for `count` payloads, for each set."""
        return self._empty(count, layout.nbytes, dtype=torch.uint8)

    def reset(self) -> None:
        """Fill the residuals with new random numbers."""
        self._draw(self.residuals, KEPT)

    def _empty(self, *shape: int, dtype: torch.dtype) -> list[Tensor]:
        tensors = SETS if self.device.type == "cuda" else 1
        made = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(tensors)]
        return list(islice(cycle(made), self.sets))

    def _draw(self, tensors: list[Tensor], size: float) -> None:
        for tensor in dict.fromkeys(tensors):  # sets may share one
            tensor.normal_(std=size, generator=self._generator)

    def baselines(self) -> list[Row]:
        """Time plain torch: the addition and the zeroing that floors are computed from, a copy, and a selection."""
        gradients, residuals, outs, is_wide = self.gradients, self.residuals, self.outs, self.dtype == torch.float32
        one, other = (outs if is_wide else self.new(torch.float32) for _ in range(2))
        calls = [
            Timed(WIDE, WIDE_ADD, lambda i: one[i].add_(other[i], alpha=1e-3)),
            Timed(ZERO, self.width, lambda i: outs[i].zero_()),
            Timed("copy", self.read + self.width, lambda i: outs[i].copy_(gradients[i])),
            Timed(
                f"torch: add topk gather clear per chunk, 1/{1 / DENSITY:g}",
                self._add.moved,
                lambda i: select_per_chunk(gradients[i], residuals[i], DENSITY),
                graph=False,
            ),
        ]
        times = self._time([self._add, *calls[is_wide:]])
        self._wide_add, self._zero = times.get(WIDE, times[ADD])["p50"], times[ZERO]["p50"]
        return [self._row(one, times) for one in [self._add, *calls] if one.name in times]

    def rows(self, calls: Sequence[Timed]) -> list[Row]:
        """Time calls in turns with the addition and return a row for each."""
        times = self._time([self._add, *calls])
        return [self._row(one, times) for one in calls]

    def _time(self, calls: Sequence[Timed]) -> dict[str, Timing]:
        self.reset()
        return self._clock.time({one.name: (one.call, one.graph) for one in calls}, self._samples, self.sets)

    def _row(self, one: Timed, times: dict[str, Timing]) -> Row:
        ms, add = times[one.name]["p50"], times[ADD]["p50"]
        floor = self._zero if one.name.startswith("decode") else self._wide_add * one.moved / WIDE_ADD
        ours, selection, topk = bool(one.facts), times.get(f"{SELECT}, {one.share}"), times.get(f"{TOPK}, {one.share}")
        dense, working = self.numel * self.read, self._clock.peak(one.call)
        return {
            "kind": "codec",
            "name": one.name,
            "numel": self.numel,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "ms": times[one.name],
            "moved_bytes": one.moved,
            "gb_per_s": one.moved * self.numel / ms / 1e6,
            "add_ms": times[ADD],
            "times_add": ms / add,
            "of_floor": floor / ms if ours else None,
            "of_add": add * one.moved / self._add.moved / ms if ours else None,
            "torch_ms": selection,
            "torch_topk_ms": topk,
            "speedup": selection["p50"] / ms if selection else None,
            "dense_bytes": dense,
            "ratio": dense / one.facts["payload_bytes"] if "payload_bytes" in one.facts else None,
            "working_bytes": working,
            "working_share": None if working is None else working / dense,
            "graph": one.graph,
            "kernel": "torch",
            **one.facts,
        }


def measure(case: Case, in_parts: set[str], clock: Clock, samples: int, progress: Progress) -> Iterator[Row]:
    """Yield the rows of a case, each as soon as it is measured.

    in_parts   labels of the compressors whose parts are measured besides compress.

    Raises `Failure` with the name of the compressor if a result differs from that of the reference.
    """
    shown = set[str]()
    bench = Bench(case.numel, case.dtype, case.device, clock, samples)
    progress.start(f"{case.title}, plain torch")
    rows = bench.baselines()
    progress.finish(f"{ADD} {rows[0]['ms']['p50']:.3g} ms")
    yield from rows
    for label, given in case.compressors.items():
        progress.start(f"{case.title}, {label}")
        with _named(f"{case.title}, {label}"):
            rows = bench.rows(list(_compressor_calls(label, given, bench, in_parts=label in in_parts)))
        ours = next(row for row in rows if row["kernel"] != "torch")
        progress.finish(f"compress {ours['ms']['p50']:.3g} ms = {ours['times_add']:.3g} x add_, 1/{ours['ratio']:.4g}")
        yield from (row for row in rows if row["name"] not in shown)
        shown |= {row["name"] for row in rows}
    progress.start(f"{case.title}, Adam's update")
    with _named(f"{case.title}, Adam's update"):
        rows = bench.rows(list(_update_calls(bench)))
    progress.finish(f"write {rows[0]['ms']['p50']:.3g} ms")
    yield from rows


@contextmanager
def _named(title: str) -> Iterator[None]:
    """Put a title before the message of an error. A ValueError inside is a bug, and not one of the user's."""
    try:
        yield
    except Failure as failure:
        raise Failure(f"{title}: {failure}") from failure
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{title} does not fit the device's memory, give other --sizes: {error}") from error
    except ValueError as error:
        raise RuntimeError(f"{title}: {error}") from error


def _compressor_calls(label: str, given: Compressor, bench: Bench, *, in_parts: bool) -> Iterator[Timed]:
    """Check a compressor and yield its calls: the same selection in torch, compress, and the parts of a collective."""
    read, width = bench.read, bench.width
    gradients, residuals, outs = bench.gradients, bench.residuals, bench.outs
    layout = given.layout(bench.numel, bench.dtype).with_key(1)
    backend, kernel = kernels.select(layout, bench.device)
    few = gradients[0][:ELEMENTS]
    check(given.layout(few.numel(), bench.dtype), gradient=few, residual=residuals[0][:ELEMENTS])
    kept, share = kept_elements(layout), ""
    if kept:
        share = f"1/{bench.numel / kept:.3g}"
        yield Timed(f"{TOPK}, {share}", width, lambda i: residuals[i].abs().topk(kept, sorted=False), graph=False)
        yield Timed(
            f"{SELECT}, {share}", read + 2 * width, lambda i: select(gradients[i], residuals[i], kept), graph=False
        )
    facts = {"spec": label, "kernel": _name(kernel), "payload_bytes": layout.nbytes}
    timed = partial(Timed, graph=backend == "cuda", facts=facts)
    size, payloads = layout.nbytes / bench.numel, bench.payloads(layout, PAYLOADS if in_parts else 1)
    for number in range(len(payloads[0])):  # from different gradients, as those of different ranks
        for i, stack in enumerate(payloads):
            kernel.encode(gradients[(i + number) % bench.sets], residuals[i], layout, stack[number])

    def decode(count: int) -> Call:
        return lambda i: kernel.decode(payloads[i][:count], layout, outs[i], weight=1 / count, add=False)

    both = 2 * width + size
    calls: dict[str, tuple[float, Call]] = {
        "compress": (
            read + both,
            lambda i: compress(kernel, gradients[i], residuals[i], layout, payloads[i][0]),
        ),
        "encode": (
            read + width + size,
            lambda i: kernel.encode(gradients[i], residuals[i], layout, payloads[i][0]),
        ),
        "commit": (read + both, lambda i: kernel.commit(gradients[i], outs[i], layout, payloads[i][0])),
        **{f"decode {count} x": (width + count * size, decode(count)) for count in (1, PAYLOADS)},
        "accumulate": (both, lambda i: kernel.decode(payloads[i][:1], layout, outs[i], weight=0.5, add=True)),
    }
    for part, (moved, call) in calls.items():
        if part == "compress" or in_parts:
            yield timed(f"{part} {label}", moved, call, share=share if part == "compress" else "")


def _update_calls(bench: Bench) -> Iterator[Timed]:
    """Check Adam's update and yield its calls.

    `write` reads gradient and moments and writes the update. `advance` reads the residual too, and writes the moments
    and the residual. The moments have the dtype of the residual, which is float32 for a gradient of 16 bits too.
    """
    read, width = bench.read, bench.width
    gradients, residuals, outs = bench.gradients, bench.residuals, bench.outs
    momenta = bench.new(residuals[0].dtype)
    squares = [each.square_().add_(0.1) for each in dict.fromkeys(bench.new(residuals[0].dtype))]
    updates = [_adam(m, v) for m, v in zip(momenta, cycle(squares), strict=False)]
    few = slice(0, ELEMENTS)
    check_update(_adam(momenta[0][few], squares[0][few]), gradients[0][few], residuals[0][few])
    facts = {"kernel": _name(kernels.adam(bench.device))}
    yield Timed(WRITE, read + 3 * width, lambda i: updates[i].write(gradients[i], outs[i]), facts=facts)
    yield Timed(ADVANCE, read + 6 * width, lambda i: updates[i].advance(gradients[i], residuals[i]), facts=facts)


def _adam(m: Tensor, v: Tensor) -> AdamUpdate:
    numbers = {"beta1": 0.5, "factor": 1.0, "scale": 1.0, "floor": 1e-8, "limit": 8.0, "rate": 1.0, "beta2": 0.999}
    by_numbers = kernels.adam_by_numbers(m.device)
    on_device = None if by_numbers is None else torch.tensor(by_numbers.numbers_of(**numbers), device=m.device)
    return AdamUpdate(m, v, **numbers, on_device=on_device)


def select(gradient: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do the work of a compressor in torch: add, topk of the whole tensor, gather, a cast to float16, and clear."""
    residual.add_(gradient)
    positions = residual.abs().topk(k, sorted=False).indices
    values = residual[positions].to(torch.float16)
    residual[positions] = 0
    return positions, values


def select_per_chunk(gradient: Tensor, residual: Tensor, density: float) -> list[tuple[Tensor, Tensor]]:
    """Apply error feedback and select the largest elements of each chunk of 4,096: full chunks first, then the rest."""
    residual.add_(gradient)
    full = residual.numel() // CHUNK * CHUNK
    selected = []
    for rows in (residual[:full].view(-1, CHUNK), residual[full:].unsqueeze(0)):
        if rows.numel():
            positions = rows.abs().topk(ceil(rows.shape[1] * density), dim=1, sorted=False).indices
            selected.append((positions, rows.gather(1, positions)))
            rows.scatter_(1, positions, 0)
    return selected


def kept_elements(layout: Layout) -> int:
    """Return the number of elements that a layout keeps, 0 if it selects nothing."""
    if isinstance(layout, TopKLayout):
        return layout.rows * layout.record.k + (layout.tail.k if layout.tail else 0)
    return layout.k if isinstance(layout, RandomKLayout) else 0


def _name(kernel: object) -> str:
    return str(getattr(kernel, "__name__", type(kernel).__name__))
