"""A training step of a GPT with 100 million parameters: two ranks on one GPU, over gloo, each way in turns.

    PYTHONPATH=src python3 benchmarks/gpu_step.py [--rounds 5] [--out results.jsonl]

Both ranks share the GPU and this machine's loopback, so "no communication" is the time of two backward passes at once,
under `no_sync`; "a hook that sends nothing" adds what DDP itself costs.
Float32 parameters, bfloat16 autocast. Milliseconds are those of the slower rank, from zero_grad to the end of the
device's work; bytes are those of the loopback interface, divided by ranks and steps.

For thinwire's optimizers two more columns: milliseconds of Python for each bucket, in DDP's hook and in `step()`. In
`step()` it is the time of the whole call, less what it waited for the network, divided by the number of buckets.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.tools.loopback import sent_bytes
from thinwire.tools.train.models.gpt import GPTConfig

CONFIG = GPTConfig(layers=14, width=768, heads=12, context=512)
BATCH = 4
TOPK = "topk:ratio=1/64,bits=2"


def nothing_hook(_: object, bucket: Any) -> "torch.futures.Future[torch.Tensor]":
    """Send nothing: what is left is DDP itself, which copies gradients into buckets and calls Python for each."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[bucket.buffer().device])
    future.set_result(bucket.buffer())
    return future


WAYS = {
    "no communication": None,
    "a hook that sends nothing": nothing_hook,
    "dense": None,
    "fp16_compress_hook": fp16_compress_hook,
    "bf16_compress_hook": bf16_compress_hook,
    f"attach {TOPK}": TOPK,
    "attach quantize:bits=8": "quantize:bits=8",
    f"thinwire.AdamW {TOPK}": TOPK,
    f"thinwire.SGD {TOPK}": TOPK,
    "a hook that sends nothing, buckets of 100 MB": nothing_hook,
    "dense, buckets of 100 MB": None,
    f"thinwire.AdamW {TOPK}, buckets of 100 MB": TOPK,
}


class Way:
    """A model, and how its gradients are averaged."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module = DistributedDataParallel(
            CONFIG.build(0).cuda(), device_ids=[0], gradient_as_bucket_view=True,
            bucket_cap_mb=100 if "100 MB" in name else None,
        )  # fmt: skip
        told: Any = WAYS[name]
        if name.startswith("thinwire.AdamW"):
            self.optimizer: Any = thinwire.AdamW(self.module, lr=1e-4, compressor=told, warmup_steps=2)
        elif name.startswith("thinwire.SGD"):
            self.optimizer = thinwire.SGD(self.module, lr=1e-3, compressor=told, warmup_steps=2)
        else:
            self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
            if isinstance(told, str):
                thinwire.attach(self.module, told)
            elif told is not None:
                self.module.register_comm_hook(None, told)

        self.hook_seconds = self.step_seconds = 0.0
        self.buckets = 0
        if hasattr(self.optimizer, "add_bucket"):
            self._time_python()

    def _time_python(self) -> None:
        add_bucket, step = self.optimizer.add_bucket, self.optimizer.step

        def timed_bucket(*args: Any, **options: Any) -> None:
            started = time.perf_counter()
            add_bucket(*args, **options)
            self.hook_seconds += time.perf_counter() - started
            self.buckets += 1

        def timed_step() -> None:
            started = time.perf_counter()
            step()
            self.step_seconds += time.perf_counter() - started - self.optimizer.sync.last_step.waited

        self.optimizer.add_bucket, self.optimizer.step = timed_bucket, timed_step

    def step(self, tokens: torch.Tensor) -> None:
        silent: Callable[[], AbstractContextManager[None]] = self.module.no_sync
        with silent() if self.name == "no communication" else nullcontext():
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                scores = self.module(tokens[:, :-1])
            F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()


def join(rank: int, rendezvous: str) -> torch.Tensor:
    """Be one of two ranks on the first GPU; the tokens of this one."""
    torch.cuda.set_device(0)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    return torch.randint(256, (BATCH, CONFIG.context + 1), generator=torch.Generator().manual_seed(rank)).cuda()


def rank_main(rank: int, rendezvous: str, rounds: int, steps: int, names: list[str], out: str) -> None:
    tokens = join(rank, rendezvous)
    times: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, float] = {}
    python: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name in names:  # one at a time is in memory; each makes its own model anew
            way = Way(name)
            for _ in range(18):  # the warm-up, what is compiled and recorded, and the first averages of second moments
                way.step(tokens)
            torch.cuda.synchronize()
            way.hook_seconds = way.step_seconds = 0.0
            way.buckets = 0
            dist.barrier()
            before = sent_bytes()
            for _ in range(steps):
                dist.barrier()
                started = time.perf_counter()
                way.step(tokens)
                torch.cuda.synchronize()
                took = torch.tensor([1e3 * (time.perf_counter() - started)])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[name].append(float(took))
            dist.barrier()
            sent[name] = (sent_bytes() - before) / 2 / steps
            if way.buckets:
                python[name] = 1e3 * way.hook_seconds / way.buckets, 1e3 * way.step_seconds / way.buckets
            del way
            torch.cuda.empty_cache()
    if rank == 0:
        report(times, sent, python, out)
    dist.destroy_process_group()


def report(
    times: dict[str, list[float]], sent: dict[str, float], python: dict[str, tuple[float, float]], out: str
) -> None:
    conditions = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": 2, "backend": "gloo, loopback",
        "parameters": sum(p.numel() for p in CONFIG.build(0).parameters()), "batch": BATCH, "config": str(CONFIG),
        "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    rows = []
    print(f"{conditions}\n{'way':56} {'p20':>9} {'p50 ms':>9} {'p80':>9} {'x dense':>8} {'x none':>7} "
          f"{'MB per rank and step':>21} {'hook ms':>8} {'step ms':>8}")  # fmt: skip
    dense, none = (statistics.median(times.get(name, [float("nan")])) for name in ("dense", "no communication"))
    for name, taken in times.items():
        fifths = statistics.quantiles(taken, n=5)
        row = {"way": name, "p20": fifths[0], "p50": statistics.median(taken), "p80": fifths[3], "bytes": sent[name]}
        if name in python:
            row |= {"hook_ms": python[name][0], "step_ms": python[name][1]}
        rows.append(row)
        each = "".join(f" {ms:8.3f}" for ms in python.get(name, ()))
        print(f"{name:56} {row['p20']:9.1f} {row['p50']:9.1f} {row['p80']:9.1f} {dense / row['p50']:8.2f} "
              f"{row['p50'] / none:7.2f} {sent[name] / 1e6:21.2f}{each}", flush=True)  # fmt: skip
    if out:
        Path(out).write_text("".join(json.dumps(line) + "\n" for line in [conditions, *rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="in each, every way is set up anew and takes its turn")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a way and round")
    parser.add_argument("--only", nargs="+", default=[""], help="ways with one of these in their name")
    parser.add_argument("--out", default="", help="JSON lines")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in WAYS if name == "no communication" or any(part in name for part in arguments.only)]
        given = (f"{folder}/rendezvous", arguments.rounds, arguments.steps, names, arguments.out)
        spawn(rank_main, args=given, nprocs=2)


if __name__ == "__main__":
    main()
