"""Numba kernels for CPU tensors, whose speed is limited by memory bandwidth.

A gradient of 25 million float32 elements is 100 MB. `residual.add_(grad)` reads it and its residual once. Here `encode`
also reads both once and writes only the payload; `commit` reads both again and writes the residual. All other work
happens on one chunk at a time, which with the usual 4,096 elements stays in the L1 cache.

The kernels are compiled on first use, cached on disk next to this package (or in NUMBA_CACHE_DIR), and run without the
GIL on `torch.get_num_threads()` threads.
"""
