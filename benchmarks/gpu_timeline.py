"""When things happen in a training step of `gpu_step.py`: two ranks on one GPU, without a profiler.

    PYTHONPATH=src python3 benchmarks/gpu_timeline.py [NAME ...]     methods of gpu_step.py; by default thinwire.AdamW

For each rank, in milliseconds after the step began: the end of the forward pass, of backward, of `step()` and of the
device's work; then for each bucket when its exchange began and ended, and when it was ready to be applied. The clock is
the same in both processes.
"""

import os
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_step import LARGE_BUCKETS, TOPK, Trained, join
from torch.multiprocessing.spawn import spawn

STEPS_BEFORE, STEPS = 20, 8
"""By then everything is recorded, and second moments are not averaged again before step 32."""


def timed_step(trained: Trained, tokens: torch.Tensor) -> dict[str, Any]:
    started = time.perf_counter()
    times = trained.step(tokens)
    torch.cuda.synchronize()
    times["device"] = time.perf_counter()
    last = trained.optimizer.sync.last_step
    exchanges = [
        tuple(round(1e3 * (at - started), 2) for at in (span.start, span.stop, handle.ended))
        for handle in last.handles
        for span in handle.report.spans
        if span.phase == "exchange"
    ]
    ends = {name: round(1e3 * (at - started), 2) for name, at in times.items()}
    return {**ends, "waited": round(1e3 * last.waited, 2), "exchanges": exchanges}


def rank_main(rank: int, rendezvous: str, names: list[str]) -> None:
    tokens = join(rank, rendezvous)
    for name in names:
        trained = Trained(name)
        for _ in range(STEPS_BEFORE):
            trained.step(tokens)
        torch.cuda.synchronize()
        for number in range(STEPS):
            dist.barrier()
            mine = timed_step(trained, tokens)
            both: list[Any] = [None, None]
            dist.all_gather_object(both, mine)
            if rank == 0 and number >= STEPS - 3:
                for other, one in enumerate(both):
                    print(f"{name}, step {number}, rank {other}: {one}", flush=True)
        del trained
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    names = sys.argv[1:] or [f"thinwire.AdamW {TOPK}", f"thinwire.AdamW {TOPK}{LARGE_BUCKETS}"]
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(f"{folder}/rendezvous", names), nprocs=2)


if __name__ == "__main__":
    main()
