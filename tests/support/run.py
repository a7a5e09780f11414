"""A training that is saved and loaded: by DDP or a plain loop, between processes or, with a group, between threads."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import (
    SEVERAL,
    TOPK,
    assert_same,
    attached,
    force,
    loss_of,
    make_net,
    optimizer_bits,
    plain_module,
    policy,
    read,
    sync_bits,
    weight_bits,
    written,
)


class Run:
    """A model and its optimizer: one of thinwire, or for "attach" torch's SGD beside a synchronizer.

    best   the number of the compressor that auto is to choose.
    """

    def __init__(
        self, rank: int, kind: str, *, ddp: bool = False, buckets: dict[str, Any] = SEVERAL, compressor: Any = None,
        best: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.rank, self.kind, self.key = rank, kind, "sync" if kind == "attach" else "optimizer"
        compressor = policy(TOPK if best is None else "auto") if compressor is None else compressor
        if kind == "attach":
            self.model, self.sync, self.finish = attached(make_net(), compressor, ddp, buckets, **options)
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        else:
            self.model = DistributedDataParallel(make_net(), **buckets) if ddp else make_net()
            given = self.model if ddp else self.model.named_parameters()
            betas = {"betas": (0.9, 0.99)} if kind == "AdamW" else {}
            options = {"warmup_steps": 10, "lr": 3e-3, **betas, **options}
            self.optimizer = getattr(thinwire, kind)(given, compressor=compressor, **options)
            self.sync, self.finish = self.optimizer.sync, lambda: None
        self.owner = self.sync if kind == "attach" else self.optimizer
        if best is not None:
            force(self.sync, best)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.model, self.rank, step).backward()
            self.finish()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        saved = {"model": plain_module(self.model).state_dict(), "optimizer": self.optimizer.state_dict()}
        return saved | ({"sync": self.sync.state_dict()} if self.kind == "attach" else {})

    def load(self, states: list[dict[str, Any]] | dict[str, Any]) -> None:
        """From the state of this rank, or from those of all."""
        one = states if isinstance(states, dict) else states[0]
        plain_module(self.model).load_state_dict(one["model"])
        if self.kind == "attach":
            self.optimizer.load_state_dict(one["optimizer"])
        self.owner.load_state_dict(one[self.key] if one is states else [state[self.key] for state in states])

    def bits(self) -> dict[str, bytes]:
        if self.kind != "attach":
            return optimizer_bits(self.optimizer)
        momentum = {
            f"momentum {number}": kept["momentum_buffer"].numpy().tobytes()
            for number, kept in self.optimizer.state_dict()["state"].items()
        }
        return weight_bits(self.model) | sync_bits(self.sync) | momentum


def save(rank: int, world_size: int, how: dict[str, Any], step: int) -> bytes:
    run = Run(rank, **how)
    run.train(0, step)
    return written(run.state())


def states_of(run: Run, folder: Path | None) -> dict[str, bytes]:
    """The state as it can be saved: by each rank and, with a folder, by rank 0 alone and by torch's checkpoints."""
    states = {"own": written(run.state())}
    if folder is not None:
        saved = {"model": plain_module(run.model).state_dict(), "owner": thinwire.per_rank(run.owner)}
        dcp.save(saved, checkpoint_id=folder)
        states["torch's"] = written({**run.state(), run.key: thinwire.load_per_rank(folder, "owner")})
        run.owner.consolidate_state_dict()
        files = [written(run.state())]
        dist.broadcast_object_list(files)
        states["of rank 0"] = files[0]
    return states


def resume(
    rank: int, world_size: int, how: dict[str, Any], saved_at: list[int], last: int, folder: Path | None = None
) -> None:
    """Resume at each of these steps: the end is that of the run that never stopped. No run writes to what it loaded.

    Four ranks are two nodes, and rank 3 shares neither node nor place with rank 0.
    """
    how = {**how, "group": init_device_mesh("cpu", (2, 2))} if world_size == 4 else how
    whole, saved, done = Run(rank, **how), dict[tuple[int, str], bytes](), 0
    for step in saved_at:
        whole.train(done, step)
        done = step
        for name, state in states_of(whole, folder and folder / str(step)).items():
            saved[step, name] = state
    whole.train(done, last)
    for (step, name), content in saved.items():
        state, where = read(content), f"rank {rank}, resumed at {step} from the state {name}"
        run, again = Run(rank, **how), Run(rank, **how)
        run.load(state)
        again.load(read(written(run.state())))  # torch's own optimizers share what they loaded
        assert_same(run.bits(), again.bits(), f"saved once more, {where}")
        before = written(state[run.key])
        run.train(step, step + 1)
        assert written(state[run.key]) == before, f"the loaded state, {where}"
        again.train(step, last)
        assert_same(whole.bits(), again.bits(), where)
