"""Checkpoints: the same number of ranks goes on bit for bit, another one keeps the residuals, others are refused."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.oracle import bytes_of
from support.slow import some_slow
from support.training import (
    TOPK,
    assert_same,
    attached,
    average,
    force,
    identical,
    loss_of,
    make_net,
    optimizer_bits,
    plain_module,
    policy,
    raises,
    sync_bits,
    weight_bits,
)
from thinwire import Collective
from thinwire.collectives import LocalGroup, LocalWorld
from thinwire.sync.checkpoint import residuals_of
from thinwire.sync.ranked import strip
from thinwire.testing import RankPool, run_threads

CAP = 0.006


class Run:
    """A model, its optimizer and, for attach and the plain loop, its synchronizer.

    best   the number of the compressor that auto is to choose.
    """

    def __init__(
        self, kind: str, ddp: bool, cap: float = CAP, compressor: Any = None, best: Any = None, **options: Any
    ):
        compressor = policy(TOPK if best is None else "auto") if compressor is None else compressor
        self.kind, module = kind, make_net()
        if kind == "attach":
            warmup = options.pop("warmup_steps", 0)
            if warmup:
                compressor = thinwire.Policy(compressor.compressor, min_numel=100, warmup=[(warmup, "quantize:bits=8")])
            self.model, self.sync, self.finish = attached(module, compressor, ddp, {"bucket_cap_mb": cap}, **options)
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        else:
            self.model = DistributedDataParallel(module, bucket_cap_mb=cap) if ddp else module
            options = {"warmup_steps": 10, "lr": 3e-3, **options}
            if kind == "AdamW":
                options |= {"betas": (0.9, 0.99)}
            given = self.model if ddp else self.model.named_parameters()
            self.optimizer = getattr(thinwire, kind)(given, compressor=compressor, **options)
            self.sync, self.finish = self.optimizer.sync, lambda: None
        self.owner = self.sync if kind == "attach" else self.optimizer
        if best is not None:
            force(self.sync, best)

    def train(self, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.model, rank, step).backward()
            self.finish()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        saved = {"model": plain_module(self.model).state_dict(), "optimizer": self.optimizer.state_dict()}
        return saved | ({"sync": self.sync.state_dict()} if self.kind == "attach" else {})

    def load(self, states: list[dict[str, Any]] | dict[str, Any]) -> None:
        one = states if isinstance(states, dict) else states[0]
        plain_module(self.model).load_state_dict(one["model"])
        if self.kind == "attach":
            self.optimizer.load_state_dict(one["optimizer"])
        key = "sync" if self.kind == "attach" else "optimizer"
        self.owner.load_state_dict(states[key] if isinstance(states, dict) else [state[key] for state in states])

    def bits(self) -> dict[str, bytes]:
        if self.kind != "attach":
            return optimizer_bits(self.optimizer)
        momentum = {
            f"momentum {number}": kept["momentum_buffer"].numpy().tobytes()
            for number, kept in self.optimizer.state_dict()["state"].items()
        }
        return weight_bits(self.model) | sync_bits(self.sync) | momentum


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def run_through(rank: int, world_size: int, folder: Path, saved_at: list[int], last: int, how: dict[str, Any]) -> Any:
    run, first = Run(**how), 0
    for step in saved_at:
        run.train(rank, first, step)
        torch.save(run.state(), file_of(folder, rank * 1000 + step))
        first = step
    run.train(rank, first, last)
    return run.bits()


def resume(rank: int, world_size: int, folder: Path, step: int, last: int, how: dict[str, Any]) -> Any:
    """The end of a run that was saved again right after it was resumed. No run writes to what it loaded."""
    state = torch.load(file_of(folder, rank * 1000 + step))
    kept, run, again = deepcopy(state), Run(**how), Run(**how)
    run.load(state)
    again.load(deepcopy(run.state()))  # torch's own optimizers share what they loaded
    assert_same(run.bits(), again.bits(), "a state of a resumed run")
    run.train(rank, step, step + 2)
    if how["kind"] == "attach":  # torch's own SGD goes on with the tensors that it loaded
        kept, state = kept["sync"], state["sync"]
    assert_same(flat(kept), flat(state), "the loaded state")
    again.train(rank, step, last)
    return again.bits()


def flat(state: Any) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    rest = strip(state, "", tensors)
    return {"rest": rest, **{name: bytes_of(tensor) for name, tensor in tensors.items()}}


CASES: dict[str, dict[str, Any]] = {
    "attach ddp sharded": {"kind": "attach", "ddp": True, "collective": Collective(algorithm="sharded")},
    "attach plain randomk": {"kind": "attach", "ddp": False, "compressor": policy("randomk:ratio=1/8")},
    "attach warm-up": {"kind": "attach", "ddp": True, "warmup_steps": 70},
    "AdamW ddp": {"kind": "AdamW", "ddp": True, "collective": Collective(algorithm="gather")},
    "AdamW ddp sharded": {"kind": "AdamW", "ddp": True, "collective": Collective(algorithm="sharded")},
    "AdamW plain warm-up": {"kind": "AdamW", "ddp": False, "warmup_steps": 70},
    "SGD ddp sharded": {
        "kind": "SGD",
        "ddp": True,
        "collective": Collective(algorithm="sharded"),
        "max_grad_norm": 0.5,
    },
}


SLOW = [name for name in CASES if "sharded" not in name]


@pytest.mark.parametrize("name", some_slow(CASES, *SLOW))
def test_a_resumed_run_is_the_run_that_never_stopped(ranks: RankPool, tmp_path: Path, name: str) -> None:
    world_size = 3 if "sharded" in name else 2
    expected = ranks.run(run_through, world_size, tmp_path, [50], 100, CASES[name])
    found = ranks.run(resume, world_size, tmp_path, 50, 100, CASES[name])
    for rank in range(world_size):
        assert_same(expected[rank], found[rank], f"rank {rank}")


@pytest.mark.parametrize("name", ["attach ddp sharded", "AdamW ddp"])
def test_a_run_may_be_saved_at_any_step(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """At 0 nothing is known, at 1 DDP is about to rebuild its buckets."""
    expected = ranks.run(run_through, 2, tmp_path, [0, 1, 2], 4, CASES[name])
    for step in (0, 1, 2):
        found = ranks.run(resume, 2, tmp_path, step, 4, CASES[name])
        for rank in range(2):
            assert_same(expected[rank], found[rank], f"resumed at {step}, rank {rank}")


def load_for_others(rank: int, world_size: int, folder: Path, old_size: int, step: int, how: dict[str, Any]) -> Any:
    """Load the states of all old ranks: averages of residuals and of momentum stay, and replicas after it are alike."""
    states = [torch.load(file_of(folder, old * 1000 + step)) for old in range(old_size)]
    run = Run(**how)
    run.load(states)
    sync_states = [state.get("sync", state["optimizer"].get("thinwire")) for state in states]
    before: dict[str, Tensor] = {}
    for state in sync_states:
        for name, residual in residuals_of(state).items():
            before[name] = before.get(name, 0) + residual.double() / old_size
    sizes = {name: parameter.numel() for name, parameter in plain_module(run.model).named_parameters()}
    mine = residuals_of(run.sync.state_dict())  # a rank that took nothing over has none
    after = {name: average(mine.get(name, torch.zeros(sizes[name]))) for name in sorted(before)}
    assert any(bool(tensor.any()) for tensor in before.values())
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-7)
    if run.kind != "attach":
        kind = "exp_avg" if run.kind == "AdamW" else "momentum_buffer"
        here = run.optimizer.state_dict()["state"]
        for number in states[0]["optimizer"]["state"]:
            old = sum(state["optimizer"]["state"][number][kind].double() for state in states) / old_size
            parameter = run.optimizer.param_groups[0]["params"][number]
            new = here[number][kind] if number in here and kind in here[number] else torch.zeros(parameter.shape)
            torch.testing.assert_close(average(new), old, rtol=1e-5, atol=1e-8)
    assert run.sync.steps == step
    run.train(rank, step, step + 12)
    assert run.sync.steps == step + 12
    return weight_bits(run.model)


RESIZED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "attach ddp": (4, 2, CASES["attach ddp sharded"]),
    "attach plain": (2, 3, {"kind": "attach", "ddp": False}),
    "AdamW ddp": (4, 2, CASES["AdamW ddp sharded"]),
    "AdamW warm-up": (2, 3, {"kind": "AdamW", "ddp": False, "warmup_steps": 16}),
    "SGD plain": (2, 3, {"kind": "SGD", "ddp": False}),
    "attach buckets": (3, 3, CASES["attach ddp sharded"]),
    "AdamW buckets": (3, 3, CASES["AdamW ddp sharded"]),
}


@pytest.mark.parametrize("name", some_slow(RESIZED, "SGD plain"))
def test_another_number_of_ranks_or_another_bucket_size(ranks: RankPool, tmp_path: Path, name: str) -> None:
    old_size, new_size, how = RESIZED[name]
    ranks.run(run_through, old_size, tmp_path, [15], 15, how)
    here = how | ({"cap": 25.0} if "buckets" in name else {})
    assert identical(ranks.run(load_for_others, new_size, tmp_path, old_size, 15, here))


def refuse(rank: int, world_size: int) -> None:
    def saved(kind: str = "attach", **options: Any) -> Any:
        run = Run(kind, True, **options)
        run.train(rank, 0, 2)
        return run.owner.state_dict()

    right, of_sgd, of_adamw = saved(), saved("SGD"), saved("AdamW", warmup_steps=1)

    def attempt(state: Any, *words: str, kind: str = "attach", **options: Any) -> None:
        run = Run(kind, True, **options)
        run.train(rank, 0, 1)
        before, steps, groups = run.bits(), run.sync.steps, str(run.optimizer.param_groups)
        with raises(ValueError, *words):
            run.owner.load_state_dict(state)
        assert_same(before, run.bits(), f"after a refusal that says {words}")
        assert (run.sync.steps, str(run.optimizer.param_groups)) == (steps, groups)

    attempt(saved(compressor=policy("quantize:bits=8")), "compressor", "quantize:bits=8", "topk")
    attempt(saved(compressor=policy(TOPK, min_numel=2000)), "small", "2000", "100")
    attempt(saved(warmup_steps=5), "warmup")
    attempt({**right, "format": 99}, "99")
    attempt({**right, "rank": rank + world_size}, f"rank {rank + world_size} of {world_size}", "damaged")
    attempt({**right, "rank": (rank + 1) % world_size}, f"rank {rank} of {world_size}")
    attempt({**right, "entries": {**right["entries"], "0.weight": 7}}, "0.weight", "7", "another model")
    attempt({**right, "entries": {**right["entries"], "more": 7}}, "more", "another model")
    attempt({**right, "world_size": world_size + 1, "rank": rank + 1}, f"rank {rank} of {world_size}")
    for name in ("0.weight", "0.bias"):
        cut = {**right["residuals"], name: right["residuals"][name][:-1]}
        attempt({**right, "residuals": cut}, name)
    for garbage in (None, 5, "abc", {}, [], [5], {"format": 1}, {"format": 1, "world_size": world_size, "rank": rank}):
        attempt(garbage, "state")
    attempt({key: value for key, value in right.items() if key != "policy"}, "state")

    attempt(of_adamw, "AdamW", "SGD", kind="SGD")
    attempt(of_sgd, "AdamW", "SGD", kind="AdamW", warmup_steps=1)
    attempt(saved("SGD", warmup_steps=3), "warmup", kind="SGD")
    for garbage in (None, 5, {}, [5], torch.optim.AdamW(make_net().parameters()).state_dict()):
        attempt(garbage, "state", kind="SGD")
    broken = {**of_sgd, "param_groups": of_sgd["param_groups"] * 2}
    attempt(broken, "group", kind="SGD")


def test_checkpoints_that_do_not_fit_are_refused_and_change_nothing(ranks: RankPool) -> None:
    ranks.run(refuse, 2)


def other_names(group: LocalGroup) -> None:
    """A plain loop learns the names of the model at its first step: then at the latest must it see that they differ."""
    syncs = [thinwire.Synchronizer(policy(TOPK), group=group) for _ in range(2)]
    for sync, model in zip(syncs, (make_net(), nn.ModuleDict({"net": make_net()})), strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + group.rank)
        if sync is syncs[0]:
            sync.all_reduce_gradients(model)
            syncs[1].load_state_dict(sync.state_dict())
    with raises(ValueError, "another model"):
        syncs[1].all_reduce_gradients(model)


def test_a_checkpoint_of_a_model_with_other_names() -> None:
    run_threads(other_names, 2)


def test_groups_in_another_order() -> None:
    net, group = make_net(), LocalWorld(1).groups[0]

    def make(*layers: str) -> Any:
        groups = [{"params": [(name, p) for name, p in net.named_parameters() if name[0] in part]} for part in layers]
        return thinwire.SGD(groups, lr=0.1, compressor=policy(TOPK), group=group)

    with raises(ValueError, "parameter group 0", "other parameters"):
        make("2346", "0").load_state_dict(make("0", "2346").state_dict())
