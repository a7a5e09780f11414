"""Layouts: sizes without data, and payloads that can be cut where the tensor is cut."""

from dataclasses import replace
from itertools import product

import torch

import thinwire
from support.cases import DTYPES
from support.oracle import bytes_of
from thinwire.kernels.layout import QuantizeLayout, TopKLayout

CUTTABLE = {
    "topk:ratio=1/64,bits=2": 4096,
    "topk:ratio=1%,bits=8": 4096,
    "topk:ratio=1/16,bits=32": 4096,
    "topk:ratio=1/4,bits=2,chunk=16": 16,
    "quantize:bits=8": 16 * 256,
    "quantize:bits=1": 16 * 256,
    "quantize:bits=2,block=32": 16 * 32,
}
"""Spec -> how many elements a record holds."""


def test_the_payload_of_a_slice_is_a_slice_of_the_payload(backend: str) -> None:
    """A collective sends each share of the tensor to its owner without compressing it again."""
    for spec, dtype in product(CUTTABLE, DTYPES):
        compressor, per_record = thinwire.compressor(spec), CUTTABLE[spec]
        tensor = torch.randn(5 * per_record + per_record // 3, generator=torch.Generator().manual_seed(4)).to(dtype)
        ct, record = compressor.compress(tensor), compressor.nbytes(per_record, dtype)
        whole, decoded = bytes_of(ct.payload), ct.decompress()
        for first, last in ((0, 1), (1, 3), (2, 5), (4, 5), (0, 5), (3, None)):
            stop, end = (None, None) if last is None else (last * per_record, last * record)
            part = compressor.compress(tensor[first * per_record : stop].clone())
            assert bytes_of(part.payload) == whole[first * record : end], f"{spec}, {dtype}: {first} to {last}"
            piece = replace(ct, numel=part.numel, payload=ct.payload[first * record : end])
            assert torch.equal(piece.decompress(), decoded[first * per_record : stop]), f"{spec}, {dtype}"


def test_parts_cover_everything_once() -> None:
    specs, sizes = (*CUTTABLE, "topk:ratio=1/64,bits=2,chunk=none"), (1000, 4096, 4097, 100_003)
    for spec, limit, numel in product(specs, (1, 4096, 10_000, 1 << 30), sizes):
        layout = thinwire.compressor(spec).layout(numel, torch.float32)
        assert isinstance(layout, TopKLayout | QuantizeLayout)
        elements = nbytes = 0
        for _, part in layout.parts(limit):
            assert (part.elements.start, part.nbytes.start) == (elements, nbytes)
            elements, nbytes = part.elements.stop, part.nbytes.stop
        assert (elements, nbytes) == (numel, layout.nbytes)


def test_what_does_not_pay_is_dense() -> None:
    """Never larger than dense, and never a compressed payload of the same size either."""
    specs = (*CUTTABLE, "topk:ratio=1,bits=32", "randomk:ratio=1", "randomk:ratio=1/64")
    for numel, spec, dtype in product(range(200), specs, (torch.float32, torch.float16)):
        compressor, dense = thinwire.compressor(spec), numel * dtype.itemsize
        assert compressor.nbytes(numel, dtype) <= dense
        is_dense = type(compressor.layout(numel, dtype)).__name__ == "DenseLayout"
        assert is_dense == (compressor.nbytes(numel, dtype) == dense)
