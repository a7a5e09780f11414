"""Triton kernels for CUDA tensors: exact, in one pass over memory, and without waiting for the device.

A sparse compressor with a residual cannot be faster than `residual.add_(grad)`: two reads and a write, 12 bytes per
element. Here a chunk of gradient and residual is read once into registers, and the sum is written to the residual at
once. The elements to send are found, packed and subtracted while the next chunks are being read.

The modules have the functions `encode`, `commit` and `decode`, like `kernels.cpu`, and two more that do not wait for
the device. `flag` is an int32 tensor on the device. It is 1 afterwards if something was not finite, else 0. The caller
of `encode_flagged` sets it to 0 before:

    encode_flagged(tensor, residual, layout, key, payload, flag)   encode
    compress(tensor, residual, layout, key, payload, flag)         encode and commit, TopK and Quantize in one pass

Scratch memory comes from torch's caching allocator on the current stream, so a step that repeats allocates nothing.
After it has run once, a step can be captured into a CUDA graph, except with `chunk=none`.
"""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the CUDA kernels need Triton, which comes with torch for CUDA on Linux: pip install triton"
    ) from error
