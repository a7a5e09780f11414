"""`thinwire bench codec`: measures time, bytes and memory of every compressor and compares them with plain torch.

For each (compressor, size, dtype) it times compress with a residual, decompress and accumulate. `residual.add_(grad)`
on tensors of the same size is timed in turns with them. For a compressor that selects elements, so is the same
selection in torch operations. "x add_" and "vs torch" are ratios of medians that were measured in the same seconds.

Gradients are independent normal numbers and differ between calls. The residual is what error feedback leaves of them.
Each result is checked against the reference kernels before its row is reported.

On a GPU, `gpu` measures how close the kernels come to the memory bandwidth. Only `command`, `table` and `progress` need
packages other than torch, so `gpu.run()` works on a machine that has torch alone.
"""
