"""Triton kernels for CUDA tensors: exact, in one pass over memory, and without waiting for the device.

A sparse compressor with a residual cannot be faster than `residual.add_(grad)`: two reads and a write, 12 bytes per
element. Here a chunk of gradient and residual is read once into registers, and the sum is written to the residual at
once. The elements to send are found, packed and subtracted while the next chunks are being read.

The modules also have `encode_flagged` and `compress` (see `kernels.FastKernel`), which do not wait for the device. TopK
and Quantize encode and commit in one pass.

Scratch memory comes from torch's caching allocator on the current stream, so a step that repeats allocates nothing.
After it has run once, a step can be captured into a CUDA graph.
"""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the CUDA kernels need Triton, which comes with torch for CUDA on Linux: pip install triton"
    ) from error
