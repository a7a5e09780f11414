"""Wrong arguments: an error that says what was given and what was expected, and nothing is changed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import thinwire
from support.oracle import bytes_of
from thinwire import CompressedTensor, Compressor

SPECS = ["topk:ratio=1/64,bits=2", "topk:ratio=1/64,chunk=none", "quantize:bits=8", "randomk:ratio=1/16", "none"]
N = 4096


@pytest.fixture(params=SPECS)
def compressor(request: pytest.FixtureRequest) -> Compressor:
    return thinwire.compressor(request.param)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def refuse(compressor: Compressor, message: str, tensor: Tensor, residual: Tensor | None, **more: object) -> None:
    """`compress` raises ValueError with that message and writes neither tensor nor residual."""
    given = [x for x in (tensor, residual) if x is not None and x.device.type == "cpu"]
    before = [bytes_of(x) for x in given]
    calls = compressor.stats.calls
    with pytest.raises(ValueError, match=message):
        compressor.compress(tensor, residual, **{"key": 1, **more})
    assert [bytes_of(x) for x in given] == before, "tensor or residual was written"
    assert compressor.stats.calls == calls, "a call that failed was counted"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_dtype(compressor: Compressor, dtype: torch.dtype) -> None:
    expected = rf"tensor of {dtype}, expected one of torch\.float32, torch\.float64, torch\.float16, torch\.bfloat16"
    refuse(compressor, expected, torch.ones(N, dtype=dtype), None)
    refuse(compressor, expected, torch.ones(N, dtype=dtype), noise(N))
    with pytest.raises(ValueError, match=f"dtype {dtype}, expected one of"):
        compressor.nbytes(N, dtype)


def test_negative_count(compressor: Compressor) -> None:
    with pytest.raises(ValueError, match="-1 elements, expected 0 or more"):
        compressor.nbytes(-1)


RESIDUALS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "shape": (lambda: noise(N + 1), rf"residual has shape \({N + 1},\), .*expected shape \({N},\)"),
    "rank": (lambda: noise(N).view(64, 64), rf"residual has shape \(64, 64\), .*expected shape \({N},\)"),
    "float64": (lambda: noise(N, dtype=torch.float64), r"torch\.float64 on cpu; expected .*torch\.float32"),
    "float16": (lambda: noise(N, dtype=torch.float16), r"torch\.float16 on cpu; expected .*torch\.float32"),
    "integer": (lambda: torch.ones(N, dtype=torch.int32), r"torch\.int32 on cpu; expected .*torch\.float32"),
    "device": (lambda: torch.empty(N, device="meta"), r"torch\.float32 on meta; expected .*on cpu"),
    "strides": (lambda: noise(2 * N)[::2], "residual is not contiguous, expected a contiguous tensor"),
    "expanded": (lambda: noise(1).expand(N), "residual is not contiguous"),
}


@pytest.mark.parametrize("wrong", RESIDUALS)
def test_residual(compressor: Compressor, wrong: str) -> None:
    make, message = RESIDUALS[wrong]
    refuse(compressor, message, noise(N), make())


def test_residual_of_the_tensor_s_own_dtype(compressor: Compressor) -> None:
    """float32 residuals for 16-bit tensors: what they keep is smaller than a 16-bit float can hold."""
    for dtype in (torch.float16, torch.bfloat16):
        refuse(compressor, rf"{dtype} on cpu; expected .*torch\.float32", noise(N, dtype=dtype), noise(N, dtype=dtype))
    expected = r"torch\.float32 on cpu; expected .*torch\.float64"
    refuse(compressor, expected, noise(N, dtype=torch.float64), noise(N))


def test_tensor_not_contiguous(compressor: Compressor) -> None:
    for tensor in (noise(2 * N)[::2], noise(64, 64).t(), noise(1).expand(N)):
        refuse(compressor, r"tensor is not contiguous; call \.contiguous\(\) first", tensor, torch.zeros(tensor.shape))


def test_residual_is_the_tensor(compressor: Compressor) -> None:
    tensor, both = noise(N), noise(2 * N)
    refuse(compressor, "residual shares the tensor's memory, expected memory of its own", tensor, tensor)
    refuse(compressor, "residual shares the tensor's memory", tensor, tensor.view(N))
    refuse(compressor, "residual shares the tensor's memory", both[:N], both[N // 2 : N // 2 + N])


def test_payload_buffer_is_the_tensor_or_the_residual() -> None:
    """Writing the payload would destroy what it is made of."""
    for spec in SPECS:
        compressor = thinwire.compressor(spec)
        for wrong in (0, 1):
            given = [noise(N), noise(N)]
            out = given[wrong].view(torch.uint8)[: compressor.nbytes(N)]
            refuse(compressor, "out shares the (tensor|residual)'s memory", *given, out=out)


@pytest.mark.parametrize("spec", ["randomk:ratio=1/16", "quantize:bits=8,rounding=stochastic"])
def test_key_missing(spec: str) -> None:
    expected = "draws random numbers; give compress a key, such as the step number"
    refuse(thinwire.compressor(spec), expected, noise(N), noise(N), key=None)


def test_payload_buffer(compressor: Compressor) -> None:
    size = compressor.nbytes(N)
    buffers = {
        rf"out has shape \({size - 1},\), .*expected shape \({size},\)": torch.empty(size - 1, dtype=torch.uint8),
        r"out has .*torch\.int8 on cpu; expected .*torch\.uint8": torch.empty(size, dtype=torch.int8),
        "out has .*on meta; expected .*on cpu": torch.empty(size, dtype=torch.uint8, device="meta"),
        "out is not contiguous": torch.empty(2 * size, dtype=torch.uint8)[::2],
    }
    for message, out in buffers.items():
        refuse(compressor, message, noise(N), noise(N), out=out)


class TestDecompress:
    @pytest.fixture
    def ct(self, compressor: Compressor) -> CompressedTensor:
        return compressor.compress(noise(N), key=1)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (torch.empty(N - 1), rf"out holds {N - 1} x torch\.float32 on cpu, expected {N} floats on cpu"),
            (torch.empty(N, dtype=torch.int32), rf"out holds {N} x torch\.int32 on cpu, expected {N} floats"),
            (torch.empty(N, device="meta"), rf"out holds {N} x torch\.float32 on meta, expected {N} floats on cpu"),
            (torch.empty(2 * N)[::2], "out is not contiguous, expected a contiguous tensor to write into"),
        ],
        ids=["size", "dtype", "device", "strides"],
    )
    def test_out(self, ct: CompressedTensor, wrong: Tensor, message: str) -> None:
        for call in (ct.compressor.decompress, ct.compressor.accumulate):
            with pytest.raises(ValueError, match=message):
                call(ct, wrong)

    def test_another_compressor(self, ct: CompressedTensor) -> None:
        other, out = thinwire.TopK("1/32"), noise(N)
        before = bytes_of(out)
        for call in (other.decompress, other.accumulate):
            with pytest.raises(ValueError, match=r"made by .*, expected topk:ratio=1/32,bits=32,chunk=4096"):
                call(ct, out)
        assert bytes_of(out) == before


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (3, 5, 7), (2, 4096), (1, 1, 4097)])
@pytest.mark.parametrize("spec", SPECS)
def test_any_shape_is_right(spec: str, shape: tuple[int, ...], backend: str) -> None:
    """What is not refused: any shape, and the result is flat or in the shape of `out`."""
    compressor, tensor = thinwire.compressor(spec), noise(*shape)
    residual = torch.zeros(shape)
    ct = compressor.compress(tensor, residual, key=1)
    assert ct.decompress().shape == (tensor.numel(),)
    assert torch.equal(residual, tensor - ct.decompress(torch.empty(shape)))


def test_gradients_are_not_recorded(backend: str) -> None:
    """A parameter, its residual and a buffer that autograd watches: arithmetic on the wire has no derivative."""
    for spec in SPECS:
        compressor = thinwire.compressor(spec)
        parameter, residual = noise(N).requires_grad_(), torch.zeros(N, requires_grad=True)
        ct = compressor.compress(parameter, residual, key=1)
        assert ct.decompress(torch.zeros(N, requires_grad=True)).grad_fn is None
        assert residual.grad_fn is None
        assert torch.equal(residual, parameter - ct.decompress())
