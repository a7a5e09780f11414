"""Measures the rows of one size and dtype: plain torch, every compressor as a whole and in parts, and Adam's update."""

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from thinwire import kernels

from ..cases import Case
from ..check import Mismatch
from ..measurement import dtype_name, positions
from .buffers import Buffers
from .check import ENTRIES, PAYLOADS, check, compress, encode
from .clock import Call, Clock
from .floors import Floors, measure_floors, measure_selection
from .rows import Row
from .timer import Timer
from .updates import measure_updates


def measure(cases: Sequence[Case], in_parts: Collection[str], clock: Clock, samples: int) -> Iterator[Row]:
    """Yield each row as soon as it is measured.

    Raises `Mismatch` with the name of the compressor. `in_parts` holds the labels of the compressors that are measured
    part by part too.
    """
    first = cases[0]
    timer = Timer(Buffers(first.numel, first.dtype, first.device), clock, samples)
    floors, rows = measure_floors(timer)
    yield from rows
    selections: dict[int, tuple[Row, Row]] = {}
    for case in cases:
        one = Measured(case, timer, floors)
        try:
            one.check()
            kept, _, _ = positions(one.layout)
            if kept is not None and kept not in selections:
                selections[kept] = measure_selection(timer, floors, kept)
                yield from selections[kept]
            yield one.compressed(None if kept is None else selections[kept])
            if case.label in in_parts:
                yield from one.parts()
        except Mismatch as mismatch:
            raise Mismatch(f"{case.numel:,} x {dtype_name(case.dtype)}, {case.label}: {mismatch}") from mismatch
    try:
        yield from measure_updates(timer, floors)
    except Mismatch as mismatch:
        raise Mismatch(f"{first.numel:,} x {dtype_name(first.dtype)}, Adam's update: {mismatch}") from mismatch


class Measured:
    """A compressor that is checked and timed on the buffers of a timer."""

    def __init__(self, case: Case, timer: Timer, floors: Floors) -> None:
        self._case, self._timer, self._floors = case, timer, floors
        self._key = case.compressor.draw_key(1)
        self.layout = case.compressor.layout(case.numel, case.dtype)
        _, self.kernel = kernels.select(self.layout, case.device)

    def check(self) -> None:
        """Compare the kernel with the reference, on the first elements of the first buffers."""
        buffers = self._timer.buffers
        gradient, residual = buffers.gradients[0][:ENTRIES], buffers.residuals[0][:ENTRIES]
        check(self._case.compressor.layout(gradient.numel(), gradient.dtype), self._key, gradient, residual)

    def compressed(self, selection: tuple[Row, Row] | None) -> Row:
        """Time compress: it reads gradient and residual and writes payload and residual."""
        buffers = self._timer.buffers
        entry_bytes = buffers.gradient_bytes + 2 * buffers.residual_bytes + self._payload_bytes
        beside = {} if selection is None else {"torch_topk": selection[0].time, "torch_ops": selection[1].time}
        call = self._compress(buffers.payloads(self.layout))
        return self._row("compress", entry_bytes, call, peak=True, **self._floors.of(entry_bytes), **beside)

    def parts(self) -> Iterator[Row]:
        """Time the parts that a collective calls one after the other: encode, commit, decode."""
        buffers, kernel, layout, key = self._timer.buffers, self.kernel, self.layout, self._key
        gradients, residuals = buffers.gradients, buffers.residuals
        read = buffers.gradient_bytes + buffers.residual_bytes + self._payload_bytes
        payloads = buffers.payloads(layout, PAYLOADS)
        yield self._row(
            "encode",
            read,
            lambda i: encode(kernel, gradients[i], residuals[i], layout, key, payloads[i][0], buffers.flag),
            **self._floors.of(read),
        )
        moved = read + buffers.residual_bytes
        self._fill(payloads)
        yield self._row(
            "commit",
            moved,
            lambda i: kernel.commit(gradients[i], residuals[i], layout, key, payloads[i][0]),
            **self._floors.of(moved),
        )
        yield self._decoded(payloads, 1)
        yield self._decoded(payloads, PAYLOADS)

    def _decoded(self, payloads: list[Tensor], count: int) -> Row:
        outs, kernel, layout, key = self._timer.buffers.residuals, self.kernel, self.layout, self._key
        return self._row(
            f"decode {count} x",
            self._timer.buffers.residual_bytes + count * self._payload_bytes,
            lambda i: kernel.decode(payloads[i][:count], layout, key, outs[i], 1 / count, False),
            floor=self._floors.write.p50,
        )

    def _fill(self, payloads: list[Tensor]) -> None:
        """Fill the payloads from a different gradient each, as different ranks would."""
        buffers = self._timer.buffers
        for number in range(PAYLOADS):
            buffers.reset()
            call = self._compress([stack[number : number + 1] for stack in payloads])
            for index in range(len(payloads)):
                call(index)

    def _compress(self, payloads: list[Tensor]) -> Call:
        buffers, kernel, layout, key = self._timer.buffers, self.kernel, self.layout, self._key
        return lambda i: compress(
            kernel, buffers.gradients[i], buffers.residuals[i], layout, key, payloads[i][0], buffers.flag
        )

    @property
    def _payload_bytes(self) -> float:
        return self.layout.nbytes / self._case.numel

    def _row(self, part: str, entry_bytes: float, call: Call, *, peak: bool = False, **details: object) -> Row:
        return self._timer.row(
            f"{part} {self._case.label}", entry_bytes, call, peak=peak,
            graph=kernels.is_recordable(self.kernel, self.layout),
            kernel=getattr(self.kernel, "__name__", type(self.kernel).__name__), payload_bytes=self.layout.nbytes,
            **details,
        )  # fmt: skip
