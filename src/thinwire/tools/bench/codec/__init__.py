"""`thinwire bench codec`: every compressor's time, bytes and memory, beside what plain torch takes for the same job.

For each (compressor, size, dtype): compress with its residual, decompress, accumulate. `residual.add_(grad)` on tensors
of the same size is timed in turns with them, and, for a compressor that selects, so is the same selection written in
torch operations; "x add_" and "vs torch" are quotients of medians taken in the same seconds.

Gradients are independent normal numbers, other ones in each call; the residual is what error feedback leaves of them.
Each result is checked against the reference kernels before its row is reported.

On a GPU the question is another one, how close kernels come to the memory, and `gpu` answers it. Nothing here but
`command`, `table` and `progress` needs more than torch, so that `gpu.run()` works on a machine that has only that.
"""
