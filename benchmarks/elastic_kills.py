"""Random kills and joins in one training of 4 to 6 ranks: does it end, with the same replicas, and with which loss?

    python benchmarks/elastic_kills.py --events 100 --seed 0

Ranks are processes on this machine; half of the events kill one by SIGKILL at a random moment, half start a newcomer.
Every rank writes a digest of its weights after each round. At the end all digests of a step must be equal, and the loss
is compared with that of a training of as many steps in which nobody dies.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import thinwire
from thinwire.tools.record import Writer, read_lines

EVERY, BATCH, INPUTS, CLASSES = 8, 32, 64, 10
FEWEST, MOST = 4, 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def batch(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples with the labels of a fixed network, a tenth of them wrong."""
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, INPUTS, generator=generator)
    y = (torch.tanh(x) @ teacher).argmax(1)
    wrong = torch.rand(size, generator=generator) < 0.1
    return x, torch.where(wrong, torch.randint(CLASSES, (size,), generator=generator), y)


def train(port: int, rank: int | None, size: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    model = network()
    founder: dict[str, Any] = {} if rank is None else {"rank": rank, "size": size}
    group = thinwire.ElasticGroup(store, timeout=120, **founder)
    optimizer = thinwire.LocalSteps(torch.optim.AdamW(model.parameters(), lr=2e-3), EVERY, group=group, model=model)
    with Writer(Path(folder) / f"{group.number}-{os.getpid()}.jsonl") as log:
        while optimizer.steps < steps:
            for each in optimizer.param_groups:
                each["lr"] = 1e-3 * (1 + math.cos(math.pi * optimizer.steps / steps))
            x, y = batch(1 + 1000 * optimizer.steps + group.number, BATCH)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if optimizer.steps % EVERY == 0:
                weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
                digest = hashlib.sha256(weights).hexdigest()[:16]
                log.write({"kind": "round", "step": optimizer.steps, "digest": digest, "ranks": group.size})
                store.set("reached", str(optimizer.steps))
        with torch.no_grad():
            x, y = batch(0, 8192)
            log.write({"kind": "end", "loss": F.cross_entropy(model(x), y).item(), "events": group.events})


def run(events: int, steps: int, seed: int) -> dict[str, Any]:
    """Run one training, with this many events spread over its steps. Return what its ranks have written."""
    draw, started = random.Random(seed), time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.optim", "thinwire.kernels.cpu.ready"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:

        def start(rank: int | None) -> BaseProcess:
            process = context.Process(target=train, args=(store.port, rank, 5, steps, folder), daemon=True)
            process.start()
            return process

        alive, kills = [start(rank) for rank in range(5)], 0
        for number in range(events):
            due = (number + 1) * steps // (events + 8)
            while int(store.get("reached")) < due and all(process.is_alive() for process in alive):
                time.sleep(0.01)
            time.sleep(draw.random() * 0.2)
            kill = len(alive) > FEWEST and (len(alive) == MOST or draw.random() < 0.5)
            if kill:
                alive.pop(draw.randrange(len(alive))).kill()
                kills += 1
            else:
                alive.append(start(None))
        for process in alive:
            process.join(600)
        failed = [process.exitcode for process in alive if process.exitcode != 0]
        paths = Path(folder).glob("*.jsonl")
        rows = [row for path in paths for _, row in read_lines(path, may_be_cut_off=True)]
    digests: dict[int, set[str]] = {}
    for row in rows:
        if row["kind"] == "round":
            digests.setdefault(row["step"], set()).add(row["digest"])
    ends = [row for row in rows if row["kind"] == "end"]
    return {
        "events": events, "kills": kills, "joins": events - kills, "steps": steps, "rounds": len(digests),
        "rounds_with_different_replicas": sum(len(found) > 1 for found in digests.values()),
        "ranks_that_failed": failed, "ranks_at_the_end": len(ends),
        "lost_seen": max((sum("lost" in e for e in row["events"]) for row in ends), default=0),
        "joined_seen": max((sum("joined" in e for e in row["events"]) for row in ends), default=0),
        "loss": sorted({row["loss"] for row in ends}), "seconds": round(time.monotonic() - started),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100, help="kills and joins together")
    parser.add_argument("--steps", type=int, default=9600, help="local steps of the training")
    parser.add_argument("--seed", type=int, default=0, help="of the events")
    options = parser.parse_args()
    for events in (0, options.events):
        print(json.dumps(run(events, options.steps, options.seed)), flush=True)


if __name__ == "__main__":
    main()
