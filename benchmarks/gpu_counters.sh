#!/usr/bin/env bash
# What the kernels wait for, by the counters of the device (Nsight Compute). A minute on one GPU.
# usage: benchmarks/gpu_counters.sh [elements]
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH=src:${PYTHONPATH:-} THINWIRE_KERNELS=cuda
program='
import sys, torch, thinwire
from thinwire import kernels
numel = int(sys.argv[1])
grad, kept, flag = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
for spec in ("topk:ratio=1/64,bits=2", "quantize:bits=8"):
    layout = thinwire.compressor(spec).layout(numel, torch.float32)
    _, kernel = kernels.select(layout, grad.device)
    payloads = torch.empty(8, layout.nbytes, dtype=torch.uint8, device="cuda")
    for row in payloads:
        kernel.encode_flagged(grad.normal_(), kept, layout, 0, row, flag)
    torch.cuda.profiler.start()
    kernel.encode_flagged(grad, kept, layout, 0, payloads[0], flag)
    kernel.commit(grad, kept, layout, 0, payloads[0])
    kernel.decode(payloads[:1], layout, 0, kept, weight=1.0, add=False)
    kernel.decode(payloads, layout, 0, kept, weight=0.125, add=False)
    torch.cuda.profiler.stop()
'
ncu --clock-control none --profile-from-start off -k 'regex:(encode|decode|sum)_(chunks|blocks)' \
    --section SpeedOfLight --section WarpStateStats --section Occupancy --section LaunchStats \
    --section MemoryWorkloadAnalysis --section MemoryWorkloadAnalysis_Tables --section ComputeWorkloadAnalysis \
    python3 -c "$program" "${1:-268435456}"
