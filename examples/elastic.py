"""Ranks that come and go: two founders train, and a newcomer joins them.    python examples/elastic.py

The process that starts the ranks hosts the store. On other machines, start ranks with the address of that host.
"""

import subprocess
import sys
import time

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import thinwire

STEPS, EVERY, FOUNDERS = 240, 8, 2
LATER = 80
"""The step at which founders wait for the newcomer, which a real training would not do."""


def train(store: TCPStore, rank: int | None) -> None:
    """Train as a founder; as a newcomer if there is no rank: it waits to be admitted, and gets the common weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher, student = nn.Linear(256, 8), nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))
    group = thinwire.ElasticGroup(store, rank=rank, size=None if rank is None else FOUNDERS, timeout=60.0)
    inner = torch.optim.AdamW(student.parameters(), lr=1e-3)
    optimizer = thinwire.LocalSteps(inner, every=EVERY, model=student, group=group)
    print(f"rank {group.number} begins at step {optimizer.steps}", flush=True)
    data = torch.Generator().manual_seed(1 + group.number)
    while optimizer.steps < STEPS:
        inputs = torch.randn(64, 256, generator=data)
        loss = nn.functional.mse_loss(student(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # if a rank has died when a round ends, the others go on without it
        if optimizer.steps >= LATER and group.size == FOUNDERS:
            time.sleep(0.2)
    print(f"rank {group.number} ends with {group.size} ranks, loss {loss.item():.4f}", flush=True)


def main() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, str(store.port)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(FOUNDERS)]
    ranks.append(subprocess.Popen(command))
    for rank in ranks:
        if rank.wait():
            sys.exit("a rank failed")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        there = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
        train(there, int(sys.argv[2]) if len(sys.argv) > 2 else None)
