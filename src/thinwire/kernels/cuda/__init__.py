"""Triton kernels for CUDA tensors: one pass over the memory, exact, and without waiting for the device.

The floor of every sparse compressor with a residual is `residual.add_(grad)`: two reads and a write, 12 bytes an entry.
Here a chunk of gradient and residual is read once into registers, the sum goes back to the residual at once, and what
the chunk sends is found, packed and subtracted while the next chunks are on their way.

The modules mirror `kernels.cpu`, with two functions more for TopK and Quantize:

    compress(tensor, residual, layout, key, payload, flag)   encode and commit in one pass; flag <- 1 if not finite
    undo(tensor, residual, layout, key, payload)             takes that back, to the rounding of an addition

Only `encode` waits for the device, since it returns a bool. Scratch comes from torch's caching allocator, on the stream
that is current, so a step that repeats allocates nothing; once it has run, it can be captured into a CUDA graph
(`chunk=none` cannot).

Float64 tensors go to the reference, as does `none`, whose copies are torch's own.
"""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the CUDA kernels need Triton, which comes with torch for CUDA on Linux: pip install triton"
    ) from error
