"""Triton kernels for CUDA tensors: one pass over the memory, exact, and without waiting for the device.

The floor of every sparse compressor with a residual is `residual.add_(grad)`: two reads and a write, 12 bytes an entry.
Here a chunk of gradient and residual is read once into registers, the sum goes back to the residual at once, and what
the chunk sends is found, packed and subtracted while the next chunks are on their way.

The modules mirror `kernels.cpu`, with two functions more, neither of which waits for the device. flag is an int32
there, 0 before, and 1 afterwards if something was not finite:

    encode_flagged(tensor, residual, layout, key, payload, flag)   encode
    compress(tensor, residual, layout, key, payload, flag)         encode and commit, TopK and Quantize in one pass

Scratch comes from torch's caching allocator, on the stream that is current, so a step that repeats allocates nothing;
once it has run, it can be captured into a CUDA graph (`chunk=none` cannot).
"""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the CUDA kernels need Triton, which comes with torch for CUDA on Linux: pip install triton"
    ) from error
