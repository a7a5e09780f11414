"""Wrong arguments: an error that says what was given and what was expected, and nothing is changed."""

from itertools import product

import pytest
import torch
from torch import Tensor

import thinwire
from support.oracle import bytes_of

SPECS = ["topk:ratio=1/64,bits=2", "topk:ratio=1/64,chunk=none", "quantize:bits=8", "randomk:ratio=1/16", "none"]
N = 4096


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def refuse(message: str, tensor: Tensor, residual: Tensor | None, *, specs: list[str] = SPECS, **more: object) -> None:
    """`compress` raises ValueError with that message and writes neither tensor nor residual."""
    given = [x for x in (tensor, residual) if x is not None and x.device.type == "cpu"]
    before = [bytes_of(x) for x in given]
    for compressor in map(thinwire.compressor, specs):
        with pytest.raises(ValueError, match=message):
            compressor.compress(tensor, residual, **{"key": 1, **more})
        assert [bytes_of(x) for x in given] == before, f"{compressor}: tensor or residual was written"
        assert compressor.stats.calls == 0, f"{compressor}: a call that failed was counted"


def test_dtype_and_count() -> None:
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64):
        expected = (
            rf"tensor of {dtype}, expected one of torch\.float32, torch\.float64, torch\.float16, torch\.bfloat16"
        )
        refuse(expected, torch.ones(N, dtype=dtype), None)
        refuse(expected, torch.ones(N, dtype=dtype), noise(N))
        with pytest.raises(ValueError, match=f"dtype {dtype}, expected one of"):
            thinwire.TopK("1/64").nbytes(N, dtype)
    for spec in SPECS:
        with pytest.raises(ValueError, match="-1 elements, expected 0 or more"):
            thinwire.compressor(spec).nbytes(-1)


def test_residual_and_tensor() -> None:
    """Wrong shapes, dtypes, devices and strides, memory that two tensors share, and a missing key.

    Residuals of 16-bit tensors are float32: what they keep is smaller than a 16-bit float can hold.
    """
    tensor, both, half = noise(N), noise(2 * N), noise(N, dtype=torch.float16)
    for message, given, residual in (
        (rf"residual has shape \({N + 1},\), .*expected shape \({N},\)", tensor, noise(N + 1)),
        (rf"residual has shape \(64, 64\), .*expected shape \({N},\)", tensor, noise(64, 64)),
        (r"torch\.float64 on cpu; expected .*torch\.float32", tensor, noise(N, dtype=torch.float64)),
        (r"torch\.float16 on cpu; expected .*torch\.float32", tensor, half),
        (r"torch\.int32 on cpu; expected .*torch\.float32", tensor, torch.ones(N, dtype=torch.int32)),
        (r"torch\.float16 on cpu; expected .*torch\.float32", half, half.clone()),
        (r"torch\.bfloat16 on cpu; expected .*torch\.float32", tensor.bfloat16(), noise(N).bfloat16()),
        (r"torch\.float32 on cpu; expected .*torch\.float64", tensor.double(), noise(N)),
        (r"torch\.float32 on meta; expected .*on cpu", tensor, torch.empty(N, device="meta")),
        ("residual is not contiguous, expected a contiguous tensor", tensor, both[::2]),
        ("residual is not contiguous", tensor, noise(1).expand(N)),
        (r"tensor is not contiguous; call \.contiguous\(\) first", both[::2], torch.zeros(N)),
        ("tensor is not contiguous", noise(64, 64).t(), torch.zeros(64, 64)),
        ("tensor is not contiguous", noise(1).expand(N), torch.zeros(N)),
        ("residual shares the tensor's memory, expected memory of its own", tensor, tensor),
        ("residual shares the tensor's memory", tensor, tensor.view(N)),
        ("residual shares the tensor's memory", both[:N], both[N // 2 : N // 2 + N]),
    ):
        refuse(message, given, residual)
    expected = "draws random numbers; give compress a key, such as the step number"
    refuse(expected, tensor, noise(N), key=None, specs=["randomk:ratio=1/16"])


def test_payload_buffer() -> None:
    for spec in SPECS:
        size = thinwire.compressor(spec).nbytes(N)
        buffers = {
            rf"out has shape \({size - 1},\), .*expected shape \({size},\)": torch.empty(size - 1, dtype=torch.uint8),
            r"out has .*torch\.int8 on cpu; expected .*torch\.uint8": torch.empty(size, dtype=torch.int8),
            "out has .*on meta; expected .*on cpu": torch.empty(size, dtype=torch.uint8, device="meta"),
            "out is not contiguous": torch.empty(2 * size, dtype=torch.uint8)[::2],
        }
        for message, out in buffers.items():
            refuse(message, noise(N), noise(N), out=out, specs=[spec])
        for wrong in (0, 1):  # it would destroy both
            given = [noise(N), noise(N)]
            refuse("out shares the (tensor|residual)'s memory", *given, out=given[wrong].view(torch.uint8)[:size],
                   specs=[spec])  # fmt: skip


def test_out_of_decompress() -> None:
    wrong = {
        rf"out holds {N - 1} x torch\.float32 on cpu, expected {N} floats on cpu": torch.empty(N - 1),
        rf"out holds {N} x torch\.int32 on cpu, expected {N} floats": torch.empty(N, dtype=torch.int32),
        rf"out holds {N} x torch\.float32 on meta, expected {N} floats on cpu": torch.empty(N, device="meta"),
        "out is not contiguous, expected a contiguous tensor to write into": torch.empty(2 * N)[::2],
    }
    for spec in SPECS:
        ct = thinwire.compressor(spec).compress(noise(N), key=1)
        for call in (ct.compressor.decompress, ct.compressor.accumulate):
            for message, out in wrong.items():
                with pytest.raises(ValueError, match=message):
                    call(ct, out)
        memory = torch.zeros(4 * N, dtype=torch.uint8)
        over = ct.compressor.compress(noise(N), key=1, out=memory[: ct.nbytes])
        with pytest.raises(ValueError, match="out shares the payload's memory"):
            ct.compressor.decompress(over, memory.view(torch.float32))
        other, out = thinwire.TopK("1/32"), noise(N)
        before = bytes_of(out)
        for call in (other.decompress, other.accumulate):
            with pytest.raises(ValueError, match=r"made by .*, expected topk:ratio=1/32,bits=32,chunk=4096"):
                call(ct, out)
        assert bytes_of(out) == before


def test_any_shape_is_right(backend: str) -> None:
    """What is not refused: any shape, and the result is flat or in the shape of `out`."""
    for shape, spec in product([(), (1,), (0,), (3, 0, 2), (3, 5, 7), (2, 4096), (1, 1, 4097)], SPECS):
        compressor, tensor, residual = thinwire.compressor(spec), noise(*shape), torch.zeros(shape)
        ct = compressor.compress(tensor, residual, key=1)
        assert ct.decompress().shape == (tensor.numel(),), (spec, shape)
        assert torch.equal(residual, tensor - ct.decompress(torch.empty(shape))), (spec, shape)


def test_gradients_are_not_recorded(backend: str) -> None:
    """A parameter, its residual and a buffer that autograd watches: arithmetic on the wire has no derivative."""
    for spec in SPECS:
        compressor = thinwire.compressor(spec)
        parameter, residual = noise(N).requires_grad_(), torch.zeros(N, requires_grad=True)
        ct = compressor.compress(parameter, residual, key=1)
        assert ct.decompress(torch.zeros(N, requires_grad=True)).grad_fn is None
        assert residual.grad_fn is None
        assert torch.equal(residual, parameter - ct.decompress())
