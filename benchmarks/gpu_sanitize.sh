#!/usr/bin/env bash
# The Triton kernels under compute-sanitizer: no access outside a tensor, no race. Minutes on one GPU.
# usage: benchmarks/gpu_sanitize.sh [memcheck racecheck ...]
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH=src:tests:${PYTHONPATH:-} PYTORCH_NO_CUDA_MEMORY_CACHING=1
program='
import torch, thinwire
from thinwire.kernels.updates import AdamUpdate
for spec in ("topk:ratio=1/64,bits=2", "topk:ratio=1/8,bits=4", "topk:ratio=1/4,bits=32,chunk=16", "quantize:bits=8",
             "quantize:bits=2", "none"):
    for numel in (20, 3 * 4096 + 5, 20_000):
        c = thinwire.compressor(spec)
        tensor, residual = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")
        ct = c.compress(tensor, residual, key=1)
        if ct.layout.nbytes == 4 * numel and spec != "none":
            continue
        c.decompress(ct, payloads=ct.payload.repeat(8, 1))
        m, v = torch.randn_like(tensor), torch.rand_like(tensor)
        update, made = AdamUpdate(m, v, 0.5, 1.0, 1.0, 1e-8, 8.0, 1.0, 0.9), torch.empty_like(tensor)
        for gradient in (tensor, tensor.bfloat16()):
            update.write(gradient, made)
            update.advance(gradient, residual)
            update.advance(gradient, None)
        tensor[7] = torch.nan
        c.compress(tensor, residual, key=1)
torch.cuda.synchronize()
print("done")
'
python3 -c "$program" # compiles outside the sanitizer
for tool in "${@:-memcheck}"; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 python3 -c "$program"
done
