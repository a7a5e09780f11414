"""Ranks on one GPU, and a runner for where there is no pytest:    python tests/gpu/gpu_script.py test_collectives"""

import importlib
import os
import sys
import tempfile
import traceback
import unittest
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parents[1]))  # for support, in a script


def main(file: str) -> int:
    """Run the tests of a file one after the other, and return the number of those that failed."""
    failed = 0
    for name, function in vars(importlib.import_module(file)).items():
        if name.startswith("test_"):
            try:
                function()
                print(name, "ok", flush=True)
            except unittest.SkipTest as reason:
                print(name, "skipped:", reason, flush=True)
            except Exception:  # the others are worth knowing too
                traceback.print_exc()
                print(name, "FAILED", flush=True)
                failed += 1
    return failed


def run_ranks(function: Callable[..., None], world: int, backend: str = "gloo") -> None:
    """Call function(rank) in `world` processes, all of them on one GPU, with a process group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_main, args=(function, world, backend, f"{folder}/rendezvous"), nprocs=world)


def _rank_main(rank: int, function: Callable[..., None], world: int, backend: str, rendezvous: str) -> None:
    torch.cuda.set_device(0)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    function(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
