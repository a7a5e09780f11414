"""`sum_chunks` in Triton's interpreter, which knows no PTX: the instructions on shared memory are played by NumPy.

    TRITON_INTERPRET=1 python tests/support/triton_shared.py

Every address is checked: that it is inside the piece of memory, and aligned. Lanes that race are not seen; for that
there is compute-sanitizer (benchmarks/gpu_sanitize.sh).
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

import thinwire
from thinwire.kernels.cuda import topk, topk_sum
from thinwire.kernels.reference import topk as reference

MEMORY = np.zeros(1 << 16, np.uint8)
room = 0
"""Bytes of it that the kernel asked for."""


def to_triton(data: Any, dtype: Any) -> Any:
    data = np.asarray(data)
    shaped = tl.block_type(dtype, list(data.shape)) if data.shape else dtype
    return tl.tensor(TensorHandle(data if data.shape else data.reshape(1), dtype), shaped)


def to_numpy(given: Any) -> Any:
    return np.asarray(given.handle.data if isinstance(given, tl.tensor) else getattr(given, "value", given))


def words(at: Any, dtype: Any) -> tuple[Any, Any]:
    """The memory as numbers of this type, and which of them these addresses are."""
    at, size = to_numpy(at), np.dtype(dtype).itemsize
    assert (at >= 0).all()
    assert (at + size <= room).all()
    assert (at % size == 0).all()
    return MEMORY.view(dtype), at // size


def shared_room(nbytes: Any) -> Any:
    global room
    room = int(getattr(nbytes, "value", nbytes))
    assert room <= topk.SHARED_LIMIT
    MEMORY[:] = np.random.default_rng(0).integers(0, 256, MEMORY.size)  # as a program finds it
    return to_triton(np.array(0, np.int32), tl.int32)


def fill_shared(at: Any, word: Any) -> None:
    assert (to_numpy(at) % 16 == 0).all()
    for i in range(4):
        memory, index = words(to_numpy(at) + 4 * i, np.int32)
        memory[index] = np.int32(to_numpy(word))


def write_shared(at: Any, word: Any, byte: Any) -> None:
    memory, index = words(at, np.uint8 if getattr(byte, "value", byte) else np.int32)
    memory[index] = np.broadcast_to(to_numpy(word), index.shape).astype(memory.dtype)


def read_shared(at: Any, kind: Any) -> Any:
    kinds: dict[str, Any] = {"u8": np.uint8, "u16": np.uint16, "b32": np.int32}
    memory, index = words(at, kinds[getattr(kind, "value", kind)])
    return to_triton(memory[index].astype(np.int32), tl.int32)


def read_shared_bits(at: Any, shift: Any) -> Any:
    both = [words(to_numpy(at) + 4 * i, np.uint32) for i in range(2)]
    low, high = (memory[index].astype(np.uint64) for memory, index in both)
    shifted = ((high << np.uint64(32)) | low) >> to_numpy(shift).astype(np.uint64)
    return to_triton(shifted.astype(np.uint32).view(np.int32), tl.int32)


def read_shared_floats(at: Any) -> tuple[Any, ...]:
    four = [words(to_numpy(at) + 4 * i, np.float32) for i in range(4)]
    return tuple(to_triton(memory[index], tl.float32) for memory, index in four)


def add_to_shared(at: Any, value: Any, there: Any) -> None:
    there = to_numpy(there).astype(bool)
    memory, index = words(to_numpy(at)[there], np.float32)
    assert len(set(index)) == len(index), "two lanes add to one element"
    memory[index] += to_numpy(value)[there].astype(np.float32)


def list_ones(byte: Any, at: Any, high: Any) -> None:
    byte, at, high = (x.copy() for x in np.broadcast_arrays(to_numpy(byte), to_numpy(at), to_numpy(high)))
    for i in range(8):
        one = (byte >> i) & 1 == 1
        memory, index = words(at[one], np.uint16)
        memory[index] = high[one].astype(np.uint16)
        at[one] += 2
        high[~one] += 1


def count_ones(word: Any) -> Any:
    bits = np.unpackbits(to_numpy(word).astype(np.uint8)[..., None], axis=-1)
    return to_triton(bits.sum(-1).astype(np.int32), tl.int32)


PLAYED = [
    shared_room, fill_shared, write_shared, read_shared, read_shared_bits, read_shared_floats, add_to_shared,
    list_ones, count_ones,
]  # fmt: skip


def check(spec: str, numel: int, count: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> None:
    """Payloads lie from `offset` bytes on, so that they need not be aligned."""
    layout: Any = thinwire.compressor(spec).layout(numel, torch.float32)
    payloads = torch.zeros(count, layout.nbytes + offset, dtype=torch.uint8)[:, offset:]
    for number, row in enumerate(payloads):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(number))
        assert reference.encode(tensor, None, layout, row)
    expected, found = (torch.ones(numel, dtype=dtype) for _ in range(2))
    reference.decode(payloads, layout, expected, 1 / 3, False)
    topk.decode(payloads, layout, found, 1 / 3, False)
    assert torch.equal(expected, found), (spec, numel, count, dtype, offset)


def main() -> None:
    for function in PLAYED:
        setattr(topk_sum, function.__name__, function)
    usual, launched = topk.launch, []
    topk.launch = lambda kernel, *given, **named: (launched.append(kernel.fn.__name__), usual(kernel, *given, **named))
    topk._sums_up = lambda out, record, tile, at_once: True
    usual_spec = "topk:ratio=1/64,bits=2"
    for count in (1, 3, 8, 11):
        check(usual_spec, 8192, count)
    assert set(launched) == {"sum_chunks"}
    check(usual_spec, 4096 + 17, 3)
    assert "decode_chunks" in launched, "the tail goes the other way"
    check(usual_spec, 4096, 8, offset=1)
    check(usual_spec, 4096, 3, torch.float16)
    others = ("ratio=1/8,bits=2", "ratio=1/64,bits=2,chunk=256", "ratio=1/16,bits=2,chunk=16", "ratio=1/1000,bits=2")
    for spec in (*(f"ratio=1/64,bits={bits}" for bits in (1, 4, 8, 16, 32)), *others):
        check(f"topk:{spec}", 4096, 3)


if __name__ == "__main__":
    main()
