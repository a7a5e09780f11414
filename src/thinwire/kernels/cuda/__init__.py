"""Triton kernels for CUDA tensors: exact, each in one pass over memory, and without waiting for the device.

Encoding reads gradient and residual once, 8 bytes per element: a chunk is read into registers, where the elements to
send are found and packed while the next chunks are being read. Committing cannot be faster than `residual.add_(grad)`:
two reads and a write, 12 bytes per element.

`encode` returns a flag on the device instead of a bool, so that the CPU need not wait for the check for NaN and Inf.

Scratch memory comes from torch's caching allocator on the current stream, so a step that repeats allocates nothing.
After it has run once, a step can be captured into a CUDA graph.
"""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the CUDA kernels need Triton, which comes with torch for CUDA on Linux: pip install triton"
    ) from error
