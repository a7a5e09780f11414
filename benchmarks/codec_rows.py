"""Measures the rows of one size and dtype: plain torch, and every compressor in all its parts.

Before a kernel is timed, its results are compared with those of the reference.

The *floor* of a call is the time that its bytes take at the speed of the float32 `residual.add_(grad)` of the same run;
for decoding it is the time to write the result once. In other dtypes that addition would be too easy a floor: torch
adds bfloat16 to float32 at two thirds of the memory bandwidth of an H200. The share of it is reported as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import compressors, kernels
from thinwire.compressors import Compressor
from thinwire.kernels.layout import Layout, TopKLayout, residual_dtype
from thinwire.tools.units import parse_count

from .clock import Call, Clock, Timing
from .harness import Failure, Progress, Row

DEFAULT_SPECS = {
    "none": ["none"],
    "quantize": ["quantize:bits=8", "quantize:bits=4", "quantize:bits=2", "quantize:bits=1"],
    "randomk": ["randomk:ratio=1/64"],
    "topk": ["topk:ratio=1/64,bits=2", "topk:ratio=1/256,bits=4", "topk:ratio=1%,bits=32", "topk:ratio=1/16,bits=8"],
}
GPU_SPECS = {
    "topk": ["topk:ratio=1/64,bits=2", "topk:ratio=1/8,bits=4"],
    **{name: DEFAULT_SPECS[name] for name in ("quantize", "randomk", "none")},
}
LARGEST = 1 << 40
"""Elements of a tensor."""
OTHER_DTYPES = (torch.bfloat16, torch.float16, torch.float64)
GPU_DTYPES = ("float32", "bfloat16")
COMPARED = (1 << 24) + 123
"""Largest number of elements that are compared: full chunks, a tail, and the code path for large tensors."""
PAYLOADS = 8
SETS = 3
"""Sets of buffers on a GPU, on which calls take turns, so that none finds its data in the cache."""
KEPT = 0.3
"""Standard deviation of the residuals. That of the gradients is 1."""
WIDE_ADD = 12
"""Bytes per element of the float32 addition: two reads and a write."""
ADD, WIDE, ZERO = "residual.add_(grad)", "the same in float32", "out.zero_()"
TOPK, SELECT = "torch.topk", "torch: add topk gather fp16 clear"
_WINDOWS, _STRIDE = 8, 1088  # in elements; keeps every gradient aligned to 128 bytes


class Case(NamedTuple):
    """Tensors of one size and dtype on a device, and what is measured on them."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    compressors: dict[str, Compressor]
    """By the spec as the user wrote it."""

    @property
    def title(self) -> str:
        return f"{self.numel:,} x {str(self.dtype).removeprefix('torch.')}"


def plan(specs: Sequence[str], sizes: Sequence[str], dtypes: Sequence[str] = (), device: str = "cpu") -> list[Case]:
    """Return the cases. Raises ValueError for options that cannot be run."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device")
    numels = sorted({parse_count("--sizes", text, LARGEST) for text in sizes})
    tensors = [(numel, torch.float32) for numel in numels] + [(numels[0], dtype) for dtype in OTHER_DTYPES]
    if dtypes or device == "cuda":
        names = dict.fromkeys(dtypes or GPU_DTYPES)
        tensors = [(numel, getattr(torch, name)) for numel in numels for name in names]
    built = {spec: compressors.compressor(spec) for spec in specs or default_specs(device)}
    cases = [Case(numel, dtype, torch.device(device), built) for numel, dtype in tensors]
    for given in built.values():
        try:
            for case in cases:
                kernels.select(given.layout(case.numel, case.dtype), case.device)
        except RuntimeError as error:  # the kernels cannot be loaded
            raise ValueError(str(error)) from error
    return cases


def default_specs(device: str = "cpu") -> list[str]:
    """Return several specs for each built-in compressor and one for each compressor registered by other code."""
    known = GPU_SPECS if device == "cuda" else DEFAULT_SPECS
    others = {name: kind for name, kind in compressors.registered().items() if name not in known}
    return [
        *(spec for specs in known.values() for spec in specs),
        *(
            f"{name}:ratio=1/64" if "ratio" in {field.name for field in fields(kind)} else name
            for name, kind in others.items()
        ),
    ]


def kernel_of(given: Compressor, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[kernels.Kernel, Layout]:
    """Return the kernel of a compressor for a tensor, and the layout that it takes."""
    layout = given.layout(numel, dtype).with_key(1)
    return kernels.select(layout, device)[1], layout


def check(given: Compressor, gradient: Tensor, residual: Tensor) -> None:
    """Raise `Failure` if a result of a kernel differs from the reference, without changing a tensor."""
    kernel, layout = kernel_of(given, gradient.numel(), gradient.dtype, gradient.device)
    with kernels.force("reference"):
        both = kernel, kernels.select(layout, gradient.device)[1]
    payloads = [torch.empty(layout.nbytes, dtype=torch.uint8, device=gradient.device) for _ in both]
    for each, payload in zip(both, payloads, strict=True):
        found = each.encode(gradient, residual, layout, payload)
        if found.item() if isinstance(found, Tensor) else not found:
            raise Failure("encode reports an input that is not finite, expected a finite one")
    _same("encode: payload", *payloads)
    results: list[list[Tensor]] = []
    for each in both:
        kept, one, many, added = (residual.clone() for _ in range(4))
        each.commit(gradient, kept, layout, payloads[1])
        each.decode(payloads[1].unsqueeze(0), layout, one, 1.0, False)
        each.decode(payloads[1].repeat(PAYLOADS, 1), layout, many, 1 / PAYLOADS, False)
        each.decode(payloads[1].unsqueeze(0), layout, added, 0.5, True)
        results.append([kept, one, many, added])
    names = "commit: residual", "decode of 1: result", f"decode of {PAYLOADS}: result", "accumulate: result"
    for name, mine, theirs in zip(names, *results, strict=True):
        rtol = 2 * torch.finfo(residual.dtype).eps  # a product and a sum may fuse
        if not (name.startswith("accumulate") and torch.allclose(mine, theirs, rtol=rtol, atol=1e-30)):
            _same(name, mine, theirs)


def _same(what: str, given: Tensor, expected: Tensor) -> None:
    if not torch.equal(given, expected):
        wrong = (given != expected).nonzero().view(-1)
        where = f"the first at {int(wrong[0])}" if wrong.numel() else "all of them NaN"
        raise Failure(f"{what}: {wrong.numel()} of {given.numel()} differ from the reference, {where}")


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
    """Measures calls on tensors of one size and dtype, in turn on sets of gradients, residuals and results.

    On a GPU there are `SETS` of each. On a CPU, gradients are windows of one pool of normal numbers, each shifted
    against the previous one, so that a new gradient takes no time. They share one residual.
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

    def _empty(self, *shape: int, dtype: torch.dtype) -> list[Tensor]:
        tensors = SETS if self.device.type == "cuda" else 1
        made = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(tensors)]
        return list(islice(cycle(made), self.sets))

    def _draw(self, tensors: list[Tensor], size: float) -> None:
        for tensor in dict.fromkeys(tensors):  # sets may share one
            tensor.normal_(std=size, generator=self._generator)

    def baselines(self) -> list[Row]:
        """Time plain torch: the addition and the zeroing that floors are computed from, a copy, and a selection."""
        gradients, outs, is_wide = self.gradients, self.outs, self.dtype == torch.float32
        one, other = (outs if is_wide else self.new(torch.float32) for _ in range(2))
        calls = [
            Timed(WIDE, WIDE_ADD, lambda i: one[i].add_(other[i], alpha=1e-3)),
            Timed(ZERO, self.width, lambda i: outs[i].zero_()),
            Timed("copy", self.read + self.width, lambda i: outs[i].copy_(gradients[i])),
        ]
        times = self._time([self._add, *calls[is_wide:]])
        self._wide_add, self._zero = times.get(WIDE, times[ADD])["p50"], times[ZERO]["p50"]
        return [self._row(one, times) for one in [self._add, *calls] if one.name in times]

    def rows(self, calls: Sequence[Timed]) -> list[Row]:
        """Time calls in turns with the addition and return a row for each."""
        times = self._time([self._add, *calls])
        return [self._row(one, times) for one in calls]

    def _time(self, calls: Sequence[Timed]) -> dict[str, Timing]:
        self._draw(self.residuals, KEPT)
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
    """Yield the rows of a case; of the compressors `in_parts` with those of their parts. Raises `Failure`."""
    shown = set[str]()
    bench = Bench(case.numel, case.dtype, case.device, clock, samples)
    rows = bench.baselines()
    progress.finish(f"{case.title}, plain torch", f"{ADD} {rows[0]['ms']['p50']:.3g} ms")
    yield from rows
    for label, given in case.compressors.items():
        title = f"{case.title}, {label}"
        with _named(title):
            rows = bench.rows(list(_compressor_calls(label, given, bench, in_parts=label in in_parts)))
        ours = next(row for row in rows if row["kernel"] != "torch")
        progress.finish(title, f"{ours['ms']['p50']:.3g} ms = {ours['times_add']:.3g} x add_, 1/{ours['ratio']:.4g}")
        yield from (row for row in rows if row["name"] not in shown)
        shown |= {row["name"] for row in rows}


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
    check(given, gradients[0][:COMPARED], residuals[0][:COMPARED])
    kernel, layout = kernel_of(given, bench.numel, bench.dtype, bench.device)
    kept, share = getattr(layout, "k", 0), ""
    if isinstance(layout, TopKLayout):
        kept = layout.rows * layout.record.k + (layout.tail.k if layout.tail else 0)
    if kept:
        share = f"1/{bench.numel / kept:.3g}"
        yield Timed(f"{TOPK}, {share}", width, lambda i: residuals[i].abs().topk(kept, sorted=False), graph=False)
        yield Timed(
            f"{SELECT}, {share}", read + 2 * width, lambda i: select(gradients[i], residuals[i], kept), graph=False
        )
    facts = {"spec": label, "kernel": getattr(kernel, "__name__", ""), "payload_bytes": layout.nbytes}
    timed = partial(Timed, graph=kernels.select(layout, bench.device)[0] == "cuda", facts=facts)
    size, payloads = layout.nbytes / bench.numel, bench.payloads(layout, PAYLOADS if in_parts else 1)
    for number in range(len(payloads[0])):  # from different gradients, as those of different ranks
        for i, stack in enumerate(payloads):
            kernel.encode(gradients[(i + number) % bench.sets], residuals[i], layout, stack[number])

    def encode(i: int) -> None:
        kernel.encode(gradients[i], residuals[i], layout, payloads[i][0])

    def compress(i: int) -> None:
        encode(i)
        kernel.commit(gradients[i], residuals[i], layout, payloads[i][0])

    def decode(count: int) -> Call:
        return lambda i: kernel.decode(payloads[i][:count], layout, outs[i], 1 / count, False)

    both = 2 * width + size
    calls: dict[str, tuple[float, Call]] = {
        "compress": (read + both, compress),
        "encode": (read + width + size, encode),
        "commit": (read + both, lambda i: kernel.commit(gradients[i], outs[i], layout, payloads[i][0])),
        **{f"decode {count} x": (width + count * size, decode(count)) for count in (1, PAYLOADS)},
        "accumulate": (both, lambda i: kernel.decode(payloads[i][:1], layout, outs[i], 0.5, True)),
    }
    for part, (moved, call) in calls.items():
        if part == "compress" or in_parts:
            yield timed(f"{part} {label}", moved, call, share=share if part == "compress" else "")


def select(gradient: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do the work of a compressor in torch: add, topk of the whole tensor, gather, a cast to float16, and clear."""
    residual.add_(gradient)
    positions = residual.abs().topk(k, sorted=False).indices
    values = residual[positions].to(torch.float16)
    residual[positions] = 0
    return positions, values
