"""`consolidate_state_dict`: what rank 0 then saves alone is enough for every rank, and for any number of ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from support.run import Run
from support.training import TOPK, assert_same, raises, read, sync_bits, written
from thinwire import Collective
from thinwire.collectives import LocalGroup, LocalWorld
from thinwire.collectives.stream import stream
from thinwire.sync import consolidate
from thinwire.sync.checkpoint import own_state
from thinwire.sync.ranked import strip
from thinwire.testing import run_threads

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"warmup_steps": 2, "collective": Collective(algorithm="sharded")},
    "SGD": {"momentum": 0.9},
    "attach": {"collective": Collective(algorithm="sharded")},
}
STEPS = 5


def save(group: LocalGroup, kind: str, to: int) -> tuple[bytes, bytes, dict[str, bytes]]:
    """Consolidates after some steps, and trains on to the end."""
    run = Run(group.rank, kind, group=group, **KINDS[kind])
    run.train(0, STEPS)
    own, before = run.owner.state_dict(), written(run.state())
    run.owner.consolidate_state_dict(to)
    state, complete = run.owner.state_dict(), written(run.state())
    assert own_state(state).keys() == own.keys()
    assert (state.keys() != own.keys() or state.get("thinwire", {}).keys() != own.get("thinwire", {}).keys()) == (
        group.rank == to
    )
    run.train(STEPS, STEPS + 3)
    assert run.owner.state_dict().keys() == own.keys(), "it holds until the next step"
    assert "ranks" not in run.owner.state_dict().get("thinwire", {})
    return before, complete, run.bits()


def go_on(group: LocalGroup, kind: str, states: Any) -> dict[str, bytes]:
    run = Run(group.rank, kind, group=group, **KINDS[kind])
    run.load(states())
    run.train(STEPS, STEPS + 3)
    return run.bits()


@pytest.mark.parametrize(("kind", "to", "others"), [("AdamW", 0, (2, 1)), ("SGD", 1, (5,)), ("attach", 0, (2,))])
def test_what_one_rank_saved_is_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, to: int, others: tuple[int, ...]
) -> None:
    """As many ranks go on as if they had not stopped, from a file that is mapped into memory: a rank reads no more of
    it than its own state. For others it is what the list of all states is, which has its own tests."""
    monkeypatch.setattr(consolidate, "_PIECE", 10_000)  # several messages, and tensors in two of them
    own, complete, ends = zip(*run_threads(save, 3, kind, to), strict=True)
    path = tmp_path / "state.pt"
    path.write_bytes(complete[to])
    mapped = partial(torch.load, path, mmap=True, weights_only=True)
    for rank, found in enumerate(run_threads(go_on, 3, kind, mapped)):
        assert_same(ends[rank], found, f"rank {rank}")
    for count in others:
        found = run_threads(go_on, count, kind, lambda: read(complete[to]))
        assert found == run_threads(go_on, count, kind, lambda: [read(one) for one in own]), f"{count} ranks"


def one_rank_holds_and_saves_each_state_once(group: LocalGroup) -> None:
    """Its own tensors as they are, and those of others once, in a file too if they are alike.

    In the warm-up all moments are: only the residuals of small tensors are each rank's own.
    """
    run = Run(group.rank, "AdamW", group=group)
    run.train(0, STEPS)
    own = len(written(run.owner.state_dict()))
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
        assert len(written(run.owner.state_dict())) < 1.5 * own


def wrong_arguments_are_refused_and_ranks_may_go_on(group: LocalGroup) -> None:
    """The rank to save on, ranks that do not agree on it, and the state of one rank."""
    run = Run(group.rank, "SGD", group=group)
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


def parameter_groups_are_those_of_the_state_itself(group: LocalGroup) -> None:
    run, other = (Run(0, "SGD", group=group) for _ in range(2))
    run.train(0, 2)
    run.owner.consolidate_state_dict()
    run.optimizer.param_groups[0]["lr"] = 0.5  # as a scheduler does between the two calls
    state = run.owner.state_dict()
    assert state["param_groups"][0]["lr"] == 0.5
    state["param_groups"][0]["lr"] = 0.25  # as a program may do before it loads
    other.owner.load_state_dict(state)
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    assert_same(sync_bits(run.owner.sync), sync_bits(other.owner.sync), "residuals")


def before_the_first_step_and_by_one_rank_alone(group: LocalGroup) -> None:
    run = Run(group.rank, "SGD", group=group)
    run.owner.consolidate_state_dict()
    assert len(run.owner.state_dict()["thinwire"].get("ranks", ())) == (0 if group.rank else 3)
    tensors = thinwire.per_rank(run.owner)
    assert not any("ranks" in path for path in tensors[f"rank{group.rank}"]), "of this rank alone"
    run.train(0, 2)
    words = "different arguments", "'consolidate_state_dict' on rank 0", "'all_reduce_compressed' on rank"
    with raises(thinwire.MismatchError, *words):
        run.train(2, 3) if group.rank else run.owner.consolidate_state_dict()


def a_rank_that_does_not_come_is_named(group: LocalGroup) -> None:
    run = Run(group.rank, "SGD", group=group)
    run.train(0, 1)
    if group.rank == 2:
        group.leave("it has enough")
        return
    with raises(thinwire.CollectiveError, "consolidate_state_dict", "rank 2", "it has enough"):
        run.owner.consolidate_state_dict()


def bytes_that_do_not_fit_the_header_are_refused(group: LocalGroup) -> None:
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


@pytest.mark.parametrize(
    ("scene", "world_size", "turns"),
    [
        (one_rank_holds_and_saves_each_state_once, 4, False),
        (wrong_arguments_are_refused_and_ranks_may_go_on, 2, False),
        (wrong_arguments_are_refused_and_ranks_may_go_on, 2, True),
        (parameter_groups_are_those_of_the_state_itself, 1, False),
        (before_the_first_step_and_by_one_rank_alone, 3, False),
        (a_rank_that_does_not_come_is_named, 3, False),
        (bytes_that_do_not_fit_the_header_are_refused, 2, False),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_scenes(scene: Any, world_size: int, turns: bool) -> None:
    run_threads(scene, world_size, turns=turns)


def test_states_are_gathered_on_the_device_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the first step: a group of NCCL alone has no other device."""
    sync, devices = thinwire.Synchronizer(TOPK, group=LocalWorld(1).groups[0]), []
    monkeypatch.setattr(sync, "gather", lambda state, to, device: devices.append(device))
    sync.register_parameters([("weight", torch.empty(3, device="meta"))])
    sync.consolidate_state_dict()
    assert devices == [torch.device("meta")]
