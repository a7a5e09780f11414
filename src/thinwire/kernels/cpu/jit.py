"""Shared parts of the kernels: compiler settings, float formats as integers, and bit masks of comparisons.

Numba has no bfloat16 and no vectorised float16, so such tensors are passed as 16-bit integers: float16 as int16,
bfloat16 as uint16. `widen` distinguishes them by this type. It converts them to float32 with a few integer operations,
which the compiler vectorises. No function here writes 16-bit float tensors.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

from ..reference.numbers import SMALLEST_SCALE as SMALLEST_SCALE


def _sources_digest() -> str:
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder.parent / "reference" / "numbers.py"]  # that one for its constants
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_DIGEST = _sources_digest()


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        # No bounds checks: the kernels check what comes from outside.
        dispatcher: Any = njit(nogil=True, cache=True, error_model="numpy", **options)(function)
        # Numba calls a cached kernel fresh while its own file is unchanged, but kernels inline functions of other
        # files: any change in this folder must compile all of them anew.
        dispatcher._cache._cache_file._source_stamp = _DIGEST
        return dispatcher

    return decorate


# No fastmath: every backend must decode the same bits.
kernel = _compiled()
# Where a part of a kernel sees one record only, the call, which counts references to arrays, would cost as much again.
part_of_kernel = _compiled(inline="always")
# The order of a sum is free where it is only rounded to bfloat16 afterwards.
summing_kernel = _compiled(fastmath={"reassoc"})

_intrinsic: Any = intrinsic  # its callers leave out the first argument, which its type does not know

_VIEWS = {torch.float16: torch.int16, torch.bfloat16: torch.uint16}


def as_array(tensor: Tensor) -> Any:
    """Return the tensor's memory as a flat NumPy array, with 16-bit floats as integers."""
    flat = tensor.detach().view(-1)
    return flat.view(_VIEWS.get(flat.dtype, flat.dtype)).numpy()


@contextmanager
def staged(out: Tensor, *, keep: bool) -> Iterator[Any]:
    """Yield `out` as an array to add to; for 16-bit floats a float32 copy, which is rounded into `out` at the end."""
    if out.dtype.itemsize > 2:
        yield as_array(out)
        return
    wide = out.to(torch.float32) if keep else torch.empty_like(out, dtype=torch.float32)
    yield as_array(wide)
    out.copy_(wide)


def stage_limit(out: Tensor) -> int:
    """Return how many elements of `out` to process at a time, so that the copies of `staged` stay in the cache."""
    return out.numel() if out.dtype.itemsize > 2 else 1 << 18


def by_type(choose: Callable[[Any], Any]) -> Any:
    """Return a function for kernels, whose code `choose` returns for the type of its argument."""

    @wraps(choose)
    def function(x: Any) -> Any:
        raise TypeError("only inside a kernel")

    overload(function, strict=False)(choose)
    return function


@by_type
def widen(x: Any) -> Any:
    """Return an element as float32 or float64, for any storage type."""
    if x == types.uint16:  # bfloat16: the upper half of a float32
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    if x == types.int16:
        return _widen_half
    return lambda x: x


def _widen_half(x: Any) -> Any:
    magnitude = np.uint32(x) & np.uint32(0x7FFF)
    sign = np.uint32((np.uint32(x) & np.uint32(0x8000)) << np.uint32(16))
    # The exponent's bias differs by 112, and a multiplication by 2**112 also puts denormals right.
    scaled = np.uint32(magnitude << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
    special = np.uint32((magnitude << np.uint32(13)) | np.uint32(0x7F800000))
    bits = special if magnitude >= np.uint32(0x7C00) else np.float32(scaled).view(np.uint32)
    return np.uint32(bits | sign).view(np.float32)


@by_type
def magnitude_bits(x: Any) -> Any:
    """Return |x| as a signed integer of the same width. It has the order of |x|, and NaN is above infinity."""
    if x == types.float64:
        return lambda x: np.float64(x).view(np.int64) & np.int64(0x7FFFFFFFFFFFFFFF)
    return lambda x: np.int32(np.float32(x).view(np.int32) & np.int32(0x7FFFFFFF))


@by_type
def from_magnitude_bits(x: Any) -> Any:
    """Return the number with these `magnitude_bits`."""
    if x == types.int64:
        return lambda x: np.int64(x).view(np.float64)
    return lambda x: np.int32(x).view(np.float32)


@by_type
def sign_of(x: Any) -> Any:
    """Return -1 (all bits set) for negative x and -0.0, else 0, as a signed integer of the same width."""
    if x == types.float64:
        return lambda x: np.float64(x).view(np.int64) >> np.int64(63)
    return lambda x: np.int32(np.float32(x).view(np.int32) >> np.int32(31))


@by_type
def nearest_integer(x: Any) -> Any:
    """Round 0 <= x < 2**16 to the nearest integer, halves to even.

    Adding 2**23 (float64: 2**52) leaves no bits for a fraction, so the lowest bits of the sum are the rounded number.
    The compiler vectorises these two operations, but not a conversion from float to integer.
    """
    if x == types.float64:
        return lambda x: np.float64(x + np.float64(2.0**52)).view(np.int64) & np.int64(0xFFFF)
    return lambda x: np.int32(np.float32(x + np.float32(2.0**23)).view(np.int32) & np.int32(0xFFFF))


INFINITY_BITS = {4: 0x7F800000, 8: 0x7FF0000000000000}
"""`magnitude_bits` of infinity, by the width of the float in bytes. All finite numbers are below."""


@_intrinsic
def mask64(context: Any, values: Any, start: Any, threshold: Any) -> Any:
    """Return a word: bit i is set if values[start + i] >= threshold, for i in 0..63.

    With AVX-512 this takes four comparisons and no branch.
    """
    signature = types.uint64(values, types.intp, values.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        item = context.get_data_type(signature.args[0].dtype)
        vector = ir.VectorType(item, 64)
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), vector.as_pointer())
        loaded = builder.load(pointer, align=item.width // 8)
        undefined, int32 = ir.Constant(vector, ir.Undefined), ir.IntType(32)
        single = builder.insert_element(undefined, arguments[2], ir.Constant(int32, 0))
        everywhere = builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(int32, 64), [0] * 64))
        return builder.bitcast(builder.icmp_signed(">=", loaded, everywhere), ir.IntType(64))

    return signature, generate


@_intrinsic
def fused_add(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, a, a), generate


def _of_word(emit: Callable[[Any, Any], Any]) -> Any:
    """Return a function of a uint64 with an integer result, for which `emit` writes the instruction."""

    @_intrinsic
    def function(context: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, arguments[0])

        return types.int64(types.uint64), generate

    return function


# The number of set bits, and the index of the lowest one.
count_ones = _of_word(lambda builder, word: builder.ctpop(word))
lowest_one = _of_word(lambda builder, word: builder.cttz(word, ir.Constant(ir.IntType(1), 0)))


@_intrinsic
def load_as(context: Any, data: Any, at: Any, index: Any, number: Any) -> Any:
    """Return the number at `index` among those from data[at] on, of the type of `number`, aligned or not."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = context.get_data_type(signature.return_type).as_pointer()
        first = builder.bitcast(builder.gep(array.data, [arguments[1]]), pointer)
        return builder.load(builder.gep(first, [arguments[2]]), align=1)

    return number(data, types.intp, types.intp, number), generate


@part_of_kernel
def read_field(data: Any, at: int, offset: int, width: int) -> Any:
    """Return `width` <= 56 bits from bit `offset` after data[at], with one load of eight bytes.

    Near the end the load begins earlier and the shift is longer, so no byte after the end is read. `data` needs at
    least eight bytes. A call for every field would cost four times as much as the field.
    """
    byte = at + (offset >> 3)
    start = min(byte, data.size - 8)
    word = load_as(data, start, 0, np.uint64(0)) >> np.uint64(8 * (byte - start) + (offset & 7))
    return np.int64(word & (np.uint64(1) << np.uint64(width)) - np.uint64(1))


CACHE_LINE = 64


def _prefetcher(for_writing: bool, level: int) -> Any:
    @_intrinsic
    def prefetch(context: Any, values: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            byte_pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
            address = builder.bitcast(builder.gep(array.data, [arguments[1]]), byte_pointer)
            function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], function_type)
            # locality 3 is the first-level cache, 2 the second; the last number says data, not instructions
            builder.call(function, [address, *(ir.Constant(int32, n) for n in (int(for_writing), 4 - level, 1))])
            return context.get_dummy_value()

        return types.void(values, types.intp), generate

    return prefetch


# Ask for values[index] without waiting for it: to change it in a moment, or to read it after a few thousand others.
prefetch_now = _prefetcher(for_writing=True, level=1)
prefetch_soon = _prefetcher(for_writing=False, level=2)


@kernel
def cut_bfloat16(x: float) -> Any:
    """Return the 16 bits of the next bfloat16 towards zero, for x >= 0; denormal ones become 0."""
    bits = np.uint32(np.float32(x).view(np.uint32) >> np.uint32(16))
    return bits if bits >= np.uint32(SMALLEST_SCALE) else np.uint32(0)


@kernel
def from_bfloat16(bits: Any) -> Any:
    """Return the float32 value of bfloat16 bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@kernel
def read_bfloat16(data: Any, at: int) -> Any:
    """Return the float32 value of the bfloat16 at data[at]."""
    return from_bfloat16(np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8))


@kernel
def write_bfloat16(data: Any, at: int, bits: Any) -> None:
    """Write bfloat16 bits to data[at] and data[at + 1]."""
    data[at] = bits & np.uint32(0xFF)
    data[at + 1] = bits >> np.uint32(8)
