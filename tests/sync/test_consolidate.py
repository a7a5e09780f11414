"""`consolidate_state_dict`: what rank 0 then saves alone is enough for every rank, and for any number of ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.group import run_group
from support.training import (
    TOPK,
    assert_same,
    identical,
    loss_of,
    make_net,
    optimizer_bits,
    policy,
    raises,
    read,
    sync_bits,
    weight_bits,
    written,
)
from thinwire import Collective
from thinwire.collectives import LocalGroup, LocalWorld
from thinwire.collectives.stream import stream
from thinwire.sync import consolidate
from thinwire.sync.checkpoint import own_state
from thinwire.sync.ranked import strip
from thinwire.testing import RankPool, run_threads

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"kind": "AdamW", "warmup_steps": 2},
    "AdamW sharded": {"kind": "AdamW", "warmup_steps": 2, "collective": Collective(algorithm="sharded")},
    "SGD": {"kind": "SGD", "momentum": 0.9, "collective": Collective(algorithm="sharded")},
    "Synchronizer": {"kind": "Synchronizer", "collective": Collective(algorithm="sharded")},
}
STEPS = 5


class Run:
    """A model and its optimizer, without DDP unless it is given as the model."""

    def __init__(self, rank: int, *, kind: str, group: Any = None, model: nn.Module | None = None, **options: Any):
        self.rank, self.model = rank, make_net() if model is None else model
        if kind == "Synchronizer":
            self.owner: Any = thinwire.Synchronizer(policy(TOPK), group=group, **options)
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.02)
        else:
            given = self.model if model is not None else self.model.named_parameters()
            made = getattr(thinwire, kind)(given, lr=3e-3, compressor=policy(TOPK), group=group, **options)
            self.owner = self.optimizer = made

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.model, self.rank, step).backward()
            if self.owner is not self.optimizer:
                self.owner.all_reduce_gradients(self.model.named_parameters())
            self.optimizer.step()

    def bits(self) -> dict[str, bytes]:
        kept = sync_bits(self.owner) if self.owner is not self.optimizer else optimizer_bits(self.optimizer)
        return weight_bits(self.model) | kept


def save(group: LocalGroup, how: dict[str, Any], to: int = 0) -> dict[str, Any]:
    """Consolidates after some steps, and trains on to the end."""
    run = Run(group.rank, group=group, **how)
    run.train(0, STEPS)
    own = run.owner.state_dict()
    run.owner.consolidate_state_dict(to)
    state = run.owner.state_dict()
    assert (own_state(state).keys(), sorted(state)) == (own.keys(), sorted(state))
    assert (state.keys() != own.keys() or state.get("thinwire", {}).keys() != own.get("thinwire", {}).keys()) == (
        group.rank == to
    )
    saved = {"weights": written(run.model.state_dict()), "file": written(state), "own": written(own)}
    run.train(STEPS, STEPS + 3)
    assert run.owner.state_dict().keys() == own.keys(), "it holds until the next step"
    assert "ranks" not in run.owner.state_dict().get("thinwire", {})
    return {**saved, "end": run.bits()}


def go_on(group: LocalGroup, how: dict[str, Any], saved: dict[str, Any], states: Any) -> dict[str, bytes]:
    run = Run(group.rank, group=group, **how)
    run.model.load_state_dict(read(saved["weights"]))
    run.owner.load_state_dict(states() if callable(states) else read(saved["file"]))
    run.train(STEPS, STEPS + 3)
    return run.bits()


@pytest.mark.parametrize("name", KINDS)
def test_every_rank_goes_on_from_what_one_rank_saved(
    monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    """Also from a file that is mapped into memory, so that a rank reads no more of it than its own state."""
    monkeypatch.setattr(consolidate, "_PIECE", 10_000)  # several messages, and tensors in two of them
    to = 1 if name == "SGD" else 0
    saved = run_threads(save, 3, KINDS[name], to)
    path = tmp_path / "state.pt"
    path.write_bytes(saved[to]["file"])
    mapped = None if name == "SGD" else partial(torch.load, path, mmap=True, weights_only=True)
    for rank, found in enumerate(run_threads(go_on, 3, KINDS[name], saved[to], mapped)):
        assert_same(saved[rank]["end"], found, f"rank {rank}")


@pytest.mark.parametrize(("name", "others"), [("AdamW", 2), ("AdamW", 1), ("SGD", 5), ("Synchronizer", 2)])
def test_another_number_of_ranks_takes_it(name: str, others: int) -> None:
    """It is what the list of all states is, which has its own tests."""
    saved = run_threads(save, 3, KINDS[name])
    found = run_threads(go_on, others, KINDS[name], saved[0], None)
    assert found == run_threads(go_on, others, KINDS[name], saved[0], lambda: [read(each["own"]) for each in saved])


def hold(group: LocalGroup) -> None:
    """On rank 0: its own tensors as they are, and those of others once."""
    run = Run(group.rank, group=group, kind="AdamW", warmup_steps=2)
    run.train(0, STEPS)
    tensors: dict[str, Tensor] = {}
    strip(run.owner.state_dict(), "", tensors)
    run.owner.consolidate_state_dict()
    if group.rank == 0:
        found: dict[str, Tensor] = {}
        strip(run.owner.state_dict(), "", found)
        live = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.dim()}
        others = {tensor.untyped_storage().data_ptr(): tensor for tensor in found.values() if tensor.dim()}
        held = sum(tensor.untyped_storage().nbytes() for place, tensor in others.items() if place not in live)
        assert live <= others.keys(), "not copied"
        assert held <= 2 * sum(tensor.nbytes for tensor in tensors.values())


def test_one_rank_holds_each_state_once() -> None:
    run_threads(hold, 3)


def save_alike(group: LocalGroup) -> tuple[int, int]:
    run = Run(group.rank, group=group, kind="AdamW", warmup_steps=20)
    run.train(0, 3)
    own = len(written(run.owner.state_dict()))
    run.owner.consolidate_state_dict()
    return own, len(written(run.owner.state_dict()))


def test_what_is_alike_is_saved_once() -> None:
    """In the warm-up all moments are: only the residuals of small tensors are each rank's own."""
    (own, complete), *_ = run_threads(save_alike, 4)
    assert complete < 1.5 * own


def disagree(group: LocalGroup) -> None:
    run = Run(group.rank, group=group, kind="SGD")
    run.train(0, 1)
    if group.rank == 1:
        state = run.owner.state_dict()
        with raises(ValueError, "state of rank 1 of the 2", "consolidate_state_dict()", "list"):
            run.owner.load_state_dict({**state, "thinwire": {**state["thinwire"], "rank": 0}})
    for wrong in (2, -1, 0.0, True):
        with raises(ValueError, "to=", "0 to 1"):
            run.owner.consolidate_state_dict(wrong)
    with raises(thinwire.MismatchError, "consolidate_state_dict", "to 0 on rank 0, 1 on rank 1"):
        run.owner.consolidate_state_dict(group.rank)
    run.train(1, 2)
    run.owner.consolidate_state_dict()
    assert len(run.owner.state_dict()["thinwire"].get("ranks", ())) == (0 if group.rank else 2)


def test_what_is_wrong_is_refused_and_ranks_may_go_on() -> None:
    """The rank to save on, ranks that do not agree on it, and the state of one rank."""
    run_threads(disagree, 2)


def one_rank(group: LocalGroup) -> None:
    """Parameter groups are those of the state itself."""
    run, other = (Run(0, group=group, kind="SGD") for _ in range(2))
    run.train(0, 2)
    run.owner.consolidate_state_dict()
    run.optimizer.param_groups[0]["lr"] = 0.5  # as a scheduler does between the two calls
    state = run.owner.state_dict()
    assert state["param_groups"][0]["lr"] == 0.5
    state["param_groups"][0]["lr"] = 0.25  # as a program may do before it loads
    other.owner.load_state_dict(state)
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    assert_same(sync_bits(run.owner.sync), sync_bits(other.owner.sync), "residuals")


def test_one_rank_and_ranks_that_take_turns() -> None:
    run_threads(one_rank, 1)
    run_threads(disagree, 2, turns=True)


def by_ddp(rank: int, world_size: int, nodes: bool) -> dict[str, bytes]:
    """Two nodes of two ranks: rank 3 shares neither node nor place with rank 0."""
    mesh = init_device_mesh("cpu", (2, 2)) if nodes else None
    how: dict[str, Any] = {"kind": "AdamW", "warmup_steps": 2, "group": mesh}
    run = Run(rank, model=DistributedDataParallel(make_net()), **how)
    run.train(0, 4)
    weights = written(run.model.module.state_dict())
    run.owner.consolidate_state_dict()
    files = [written(run.owner.state_dict())]
    torch.distributed.broadcast_object_list(files)
    other = Run(rank, model=DistributedDataParallel(make_net()), **how)
    other.model.module.load_state_dict(read(weights))
    other.owner.load_state_dict(read(files[0]))
    for each in (run, other):
        each.train(4, 6)
    assert_same(run.bits(), other.bits(), "the ends")
    return weight_bits(run.model)


@pytest.mark.parametrize("nodes", [True, False], ids=["nodes", "world"])
def test_between_processes(ranks: RankPool, nodes: bool) -> None:
    assert identical(ranks.run(by_ddp, 4 if nodes else 2, nodes))


def too_early_and_alone(group: LocalGroup) -> None:
    """Before the first step; then a rank calls it that the others leave alone."""
    run = Run(group.rank, group=group, kind="SGD")
    run.owner.consolidate_state_dict()
    assert len(run.owner.state_dict()["thinwire"].get("ranks", ())) == (0 if group.rank else 3)
    tensors = thinwire.per_rank(run.owner)
    assert not any("ranks" in path for path in tensors[f"rank{group.rank}"]), "of this rank alone"
    run.train(0, 2)
    words = "'consolidate_state_dict' on rank 0", "'all_reduce_compressed' on rank"
    with raises(thinwire.MismatchError, "different arguments", *words):
        if group.rank == 0:
            run.owner.consolidate_state_dict()
        else:
            run.train(2, 3)


def test_before_the_first_step_and_by_one_rank_alone() -> None:
    run_threads(too_early_and_alone, 3)


def leave(rank: int, world_size: int, group: LocalGroup) -> None:
    run = Run(rank, group=group, kind="SGD")
    run.train(0, 1)
    if rank == 2:
        group.leave("it has enough")
        return
    with raises(thinwire.CollectiveError, "consolidate_state_dict", "rank 2", "it has enough"):
        run.owner.consolidate_state_dict()


def test_a_rank_that_does_not_come_is_named() -> None:
    run_group(leave, 3)


def send_what_does_not_fit(group: LocalGroup) -> None:
    header = {"rest": {}, "tensors": {"a": (torch.float32, (3,))}}
    for sizes in ([], [11], [12, 1]):
        cpu, name = torch.device("cpu"), "consolidate_state_dict"
        with raises(ValueError if group.rank == 0 else thinwire.CollectiveError, "rank 1 sent"):
            if group.rank == 0:
                consolidate.gather_states({"a": torch.ones(3)}, group=group, device=cpu, to=0, timeout=None)
            else:
                messages = [torch.frombuffer(bytearray(written(header)), dtype=torch.uint8)]
                messages += [torch.zeros(size, dtype=torch.uint8) for size in sizes]
                options: Any = {"receive": None, "most": 9, "timeout": None, "name": name}
                stream(group, cpu, to=0, send=messages.copy, **options)


def test_bytes_that_do_not_fit_the_header_are_refused() -> None:
    run_threads(send_what_does_not_fit, 2)


def test_states_are_gathered_on_the_device_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the first step: a group of NCCL alone has no other device."""
    sync, devices = thinwire.Synchronizer(TOPK, group=LocalWorld(1).groups[0]), []
    monkeypatch.setattr(sync, "gather", lambda state, to, device: devices.append(device))
    sync.register_parameters([("weight", torch.empty(3, device="meta"))])
    sync.consolidate_state_dict()
    assert devices == [torch.device("meta")]
