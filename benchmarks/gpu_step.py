"""A training step of a GPT with 100 million parameters: two ranks on one GPU, over gloo, each method in turns.

    PYTHONPATH=src python3 benchmarks/gpu_step.py [--rounds 5] [--mps] [--out results.jsonl]

Both ranks share the GPU and this machine's loopback, so "no_sync" is the time of two backward passes at once; "no
communication", a hook that sends nothing, adds what DDP itself costs. Without --mps the ranks take turns on the GPU;
with it, CUDA's multi-process service runs kernels of both at the same time, which is nearer to a GPU for each.

Methods are those of all benchmarks (thinwire/tools/bench/methods.py). It needs torch, Triton and Numba, and no package
of the command line. Float32 parameters, bfloat16 autocast. Milliseconds are those of the slower rank, from zero_grad to
the end of the device's work; bytes are those of the loopback interface, divided by ranks and steps.

For thinwire's optimizers two more columns: milliseconds of Python for each bucket, in DDP's hook and in `step()`. In
`step()` it is the time of the whole call, less what it waited for the network, divided by the number of buckets.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from recipe_gpu import multi_process_service
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from thinwire.tools.bench.harness import print_table, short
from thinwire.tools.bench.measure import timing
from thinwire.tools.bench.methods import EIGHT_BITS, TOPK, parse
from thinwire.tools.bench.training import Setup, build
from thinwire.tools.loopback import sent_bytes
from thinwire.tools.record import Writer, conditions
from thinwire.tools.train.models import GPTConfig

CONFIG = GPTConfig(layers=14, width=768, heads=12, context=512)
BATCH = 4
NO_SYNC, LARGE_BUCKETS = "no_sync", ", buckets of 100 MB"
METHODS = [
    NO_SYNC, "no communication", "dense", "fp16 hook", "bf16", f"attach {TOPK}", f"attach {EIGHT_BITS}",
    f"thinwire.AdamW {TOPK}", f"thinwire.SGD {TOPK}", f"no communication{LARGE_BUCKETS}", f"dense{LARGE_BUCKETS}",
    f"thinwire.AdamW {TOPK}{LARGE_BUCKETS}",
]  # fmt: skip


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

    def step(self, tokens: torch.Tensor) -> dict[str, float]:
        """Take a step, and return when the forward pass, the backward pass and `step()` ended."""
        silent: Any = self.module
        with silent.no_sync() if self.name == NO_SYNC else nullcontext():
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                scores = self.module(tokens[:, :-1])
            loss = F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
            forward = time.perf_counter()
            loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        return {"forward": forward, "backward": backward, "step": time.perf_counter()}


def join(rank: int, rendezvous: str) -> torch.Tensor:
    """Be one of two ranks on the first GPU; the tokens of this one."""
    torch.cuda.set_device(0)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    return torch.randint(256, (BATCH, CONFIG.context + 1), generator=torch.Generator().manual_seed(rank)).cuda()


def rank_main(rank: int, rendezvous: str, rounds: int, steps: int, names: list[str], shares_by: str, out: str) -> None:
    tokens = join(rank, rendezvous)
    times: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, float] = {}
    python: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name in names:  # one at a time is in memory; each makes its own model anew
            trained = Trained(name)
            for _ in range(18):  # the warm-up, what is compiled and recorded, and the first averages of second moments
                trained.step(tokens)
            torch.cuda.synchronize()
            trained.hook_seconds = trained.step_seconds = 0.0
            trained.buckets = 0
            dist.barrier()
            before = sent_bytes()
            for _ in range(steps):
                dist.barrier()
                started = time.perf_counter()
                trained.step(tokens)
                torch.cuda.synchronize()
                took = torch.tensor([1e3 * (time.perf_counter() - started)])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[name].append(float(took))
            dist.barrier()
            sent[name] = (sent_bytes() - before) / 2 / steps
            if trained.buckets:
                seconds = {"hook_ms": trained.hook_seconds, "step_ms": trained.step_seconds}
                python[name] = {key: 1e3 * value / trained.buckets for key, value in seconds.items()}
            del trained
            torch.cuda.empty_cache()
    if rank == 0:
        report(times, sent, python, shares_by, out)
    dist.destroy_process_group()


def report(
    times: dict[str, list[float]], sent: dict[str, float], python: dict[str, dict[str, float]], shares_by: str, out: str
) -> None:
    under = conditions(
        device=torch.cuda.get_device_name(), ranks=2, backend="gloo, loopback", batch=BATCH, config=str(CONFIG),
        parameters=sum(p.numel() for p in CONFIG.build(0).parameters()), **{"gpu shared by": shares_by},
    )  # fmt: skip
    dense, none = (statistics.median(times.get(name, [float("nan")])) for name in ("dense", NO_SYNC))
    cells = []
    with Writer(out or None) as writer:
        writer.write(under)
        for name, taken in times.items():
            ms, of_python = timing(taken), python.get(name, {})
            writer.write({"kind": "gpu step", "method": name, "ms": ms, "bytes_per_step": sent[name], **of_python})
            cells.append({
                "method": name, "p20": f"{ms['p20']:.1f}", "p50 ms": f"{ms['p50']:.1f}", "p80": f"{ms['p80']:.1f}",
                "x dense": f"{dense / ms['p50']:.2f}", "x alone": f"{ms['p50'] / none:.2f}",
                "MB/step": f"{sent[name] / 1e6:.2f}",
                "hook ms": short(of_python.get("hook_ms")), "step ms": short(of_python.get("step_ms")),
            })  # fmt: skip
    print_table(str(under), cells, text=("method",))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="in each, every method is set up anew and takes its turn")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a method and round")
    parser.add_argument("--only", nargs="+", default=[""], help="methods with one of these in their name")
    parser.add_argument("--mps", action="store_true", help="share the GPU by CUDA's multi-process service")
    parser.add_argument("--out", default="", help="JSON lines")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    shares_by = "time slices"
    if arguments.mps:
        os.environ.update(multi_process_service())
        shares_by = "multi-process service" if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else shares_by
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in METHODS if name == NO_SYNC or any(part in name for part in arguments.only)]
        given = (f"{folder}/rendezvous", arguments.rounds, arguments.steps, names, shares_by, arguments.out)
        spawn(rank_main, args=given, nprocs=2)


if __name__ == "__main__":
    main()
