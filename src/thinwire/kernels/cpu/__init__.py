"""Numba kernels for CPU tensors, at the speed of the memory.

A gradient of 25 million float32 is 100 MB: reading it and its residual once is what `residual.add_(grad)` costs. Here
`encode` reads both once and writes only the payload; `commit` reads both again and writes the residual. In between,
everything happens on one chunk at a time, which with the usual 4,096 entries stays in the first-level cache.

The kernels are compiled on first use, cached on disk beside this package (or in NUMBA_CACHE_DIR), and run without the
GIL on as many threads as `torch.get_num_threads()` says.
"""
