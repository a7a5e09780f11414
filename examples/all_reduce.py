"""A compressed all-reduce between two processes on this machine, beside a dense one: the bytes, and what is lost.

Run with `make demo`, or `python examples/all_reduce.py`.
"""

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import thinwire

WORLD, NUMEL, STEPS, SPEC = 2, 25_000_000, 20, "topk:ratio=1/64,bits=2"


def loopback_bytes() -> int | None:
    """What the kernel's loopback interface has carried so far; None where it does not tell."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), None)


def compressed_average(grad: Tensor, residual: Tensor, compressor: thinwire.Compressor) -> None:
    """Replace `grad` by the average over all ranks of what they sent; what was not sent stays in `residual`."""
    sent = compressor.compress(grad, residual)
    gathered = torch.empty(WORLD, sent.nbytes, dtype=torch.uint8)
    dist.all_gather_into_tensor(gathered.view(-1), sent.payload)
    compressor.accumulate(sent, grad.zero_(), 1 / WORLD, payloads=gathered)


def worker(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    true_grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    residual, total, dense = torch.zeros(NUMEL), torch.zeros(NUMEL), true_grad.clone()
    compressor = thinwire.compressor(SPEC)
    compressed_average(true_grad.clone(), torch.zeros(NUMEL), compressor)  # compiles the kernels, once per machine

    def measure(exchange: object, repeats: int) -> tuple[float, float]:
        """Milliseconds and bytes on the loopback interface, per step and rank."""
        dist.barrier()
        before, started = loopback_bytes(), time.perf_counter()
        for _ in range(repeats):
            exchange()  # type: ignore[operator]
        dist.barrier()
        milliseconds = 1e3 * (time.perf_counter() - started) / repeats
        after = loopback_bytes()
        return milliseconds, (after - before) / repeats / WORLD if before is not None and after is not None else 0

    def step() -> None:
        grad = true_grad.clone()
        compressed_average(grad, residual, compressor)
        total.add_(grad)

    dense_ms, dense_bytes = measure(lambda: dist.all_reduce(dense, op=dist.ReduceOp.SUM), 1)
    thin_ms, thin_bytes = measure(step, STEPS)
    same = [torch.empty_like(total) for _ in range(WORLD)]
    dist.all_gather(same, total)
    if rank == 0:
        print(f"{WORLD} processes, {NUMEL:,} float32 each, {compressor}, kernels {list(compressor.stats.kernels)}")
        print(f"dense all-reduce     {dense_bytes / 1e6:10.3f} MB sent per rank and step   {dense_ms:8.1f} ms")
        print(f"compressed           {thin_bytes / 1e6:10.3f} MB sent per rank and step   {thin_ms:8.1f} ms")
        if thin_bytes:
            print(f"on the interface     {dense_bytes / thin_bytes:10.1f} x fewer bytes (payload: {compressor.stats.ratio:.1f} x)")
        kept = residual.norm() / (STEPS * true_grad.norm())
        print(f"replicas identical   {all(torch.equal(total, other) for other in same)}")
        print(f"kept for later       {kept:10.1%} of {STEPS} gradients, in the residual: nothing is lost")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(f"{folder}/rendezvous",), nprocs=WORLD)
