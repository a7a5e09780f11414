"""A training step of a GPT with 100 million parameters: two ranks on one GPU, over gloo, each method in turns.

    PYTHONPATH=src python3 -m benchmarks.gpu_step [--only PART_OF_A_NAME ...] [--out results.jsonl]

Both ranks share the GPU and this machine's loopback, so "no_sync" is the time of two backward passes at once; "no
communication", a hook that sends nothing, adds what DDP itself costs. The ranks take turns on the GPU.

It needs torch, Triton and Numba, and no package of the command line. Float32 parameters, bfloat16 autocast.
Milliseconds are those of the slower rank, bytes those of the loopback interface, divided by ranks and steps.
"""

import argparse
import os
import re
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from thinwire.tools.record import Writer, conditions
from thinwire.tools.train.models import GPTConfig

from .clock import timing
from .harness import Row, print_table
from .methods import EIGHT_BITS, TOPK, parse
from .training import Setup, build

CONFIG = GPTConfig(layers=14, width=768, heads=12, context=512)
BATCH, WARM_UP, ROUNDS, STEPS = 4, 18, 2, 10
"""Samples of a rank and step; steps before those that count, in which kernels are compiled and recorded, and moments
averaged; rounds, in each of which every method is set up anew and takes its turn; timed steps of a turn."""
NO_SYNC, LARGE_BUCKETS = "no_sync", ", buckets of 100 MB"
METHODS = [
    NO_SYNC, "no communication", "dense", "fp16 hook", "bf16", f"attach {TOPK}", f"attach {EIGHT_BITS}",
    f"thinwire.AdamW {TOPK}", f"thinwire.SGD {TOPK}", f"no communication{LARGE_BUCKETS}", f"dense{LARGE_BUCKETS}",
    f"thinwire.AdamW {TOPK}{LARGE_BUCKETS}",
]  # fmt: skip


def sent_bytes() -> int:
    """Return the bytes that the loopback interface has sent since the system started, headers included."""
    line = re.search(r"\blo:(.*)", Path("/proc/net/dev").read_text())
    return int(line[1].split()[8]) if line else 0


class Trained:
    """A model, and how its gradients are averaged."""

    def __init__(self, name: str) -> None:
        self.name = name
        method = parse("dense" if name == NO_SYNC else name.removesuffix(LARGE_BUCKETS))
        if method.family == "adamw" and not method.in_optimizer:
            method.options["fused"] = True
        ddp = {"device_ids": [0], "gradient_as_bucket_view": True}
        if name.endswith(LARGE_BUCKETS):
            ddp["bucket_cap_mb"] = 100
        lr = 1e-4 if method.family == "adamw" else 1e-3
        made = build(method, Setup(CONFIG.build(0).cuda(), lr, ddp=ddp))
        self.module, self.optimizer = made.module, made.optimizer

    def step(self, tokens: torch.Tensor) -> None:
        silent: Any = self.module
        with silent.no_sync() if self.name == NO_SYNC else nullcontext():
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                scores = self.module(tokens[:, :-1])
            F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()


def rank_main(rank: int, rendezvous: str, names: list[str], out: str) -> None:
    """Be one of two ranks on the first GPU. The first one reports."""
    torch.cuda.set_device(0)
    warnings.simplefilter("ignore")
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=limit)
    tokens = torch.randint(256, (BATCH, CONFIG.context + 1), generator=torch.Generator().manual_seed(rank)).cuda()
    times: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name in names:  # one at a time is in memory; each makes its own model anew
            trained = Trained(name)
            for _ in range(WARM_UP):
                trained.step(tokens)
            torch.cuda.synchronize()
            dist.barrier()
            before = sent_bytes()
            for _ in range(STEPS):
                dist.barrier()
                started = time.perf_counter()
                trained.step(tokens)
                torch.cuda.synchronize()
                took = torch.tensor([1e3 * (time.perf_counter() - started)])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[name].append(float(took))
            dist.barrier()
            sent[name] = (sent_bytes() - before) / 2 / STEPS
            del trained
            torch.cuda.empty_cache()
    if rank == 0:
        rows = [{"kind": "gpu step", "method": n, "ms": timing(times[n]), "bytes_per_step": sent[n]} for n in names]
        report(rows, out)
    dist.destroy_process_group()


def report(rows: list[Row], out: str) -> None:
    """Write the rows, and print them as a table."""
    under = conditions(
        device=torch.cuda.get_device_name(), ranks=2, backend="gloo, loopback", batch=BATCH, config=str(CONFIG),
        parameters=sum(p.numel() for p in CONFIG.build(0).parameters()),
    )  # fmt: skip
    with Writer(out or None) as writer:
        for line in (under, *rows):
            writer.write(line)
    medians = {row["method"]: row["ms"]["p50"] for row in rows}
    cells = [
        {
            "method": row["method"], **{key: f"{row['ms'][key]:.1f}" for key in ("p20", "p50", "p80")},
            "x dense": f"{medians.get('dense', float('nan')) / row['ms']['p50']:.2f}",
            "x alone": f"{row['ms']['p50'] / medians[NO_SYNC]:.2f}", "MB/step": f"{row['bytes_per_step'] / 1e6:.2f}",
        }
        for row in rows
    ]  # fmt: skip
    print_table(str(under), cells, text=("method",))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="methods with one of these in their name")
    parser.add_argument("--out", default="", help="JSON lines")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    names = [name for name in METHODS if name == NO_SYNC or any(part in name for part in given.only)]
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (f"{folder}/rendezvous", names, given.out), nprocs=2)


if __name__ == "__main__":
    main()
