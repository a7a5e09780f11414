"""Parameters that AdamW trains from a later step on: their own bias corrections, their own warm-up, and resumes."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.optimizers import ADAMW, make
from support.training import (
    TOPK,
    assert_same,
    identical,
    loss_of,
    make_net,
    optimizer_bits,
    plain_module,
    policy,
    raises,
    read,
    take,
    weight_bits,
    written,
)
from thinwire.collectives import LocalGroup
from thinwire.sync.checkpoint import DamagedError
from thinwire.testing import RankPool, run_threads

FROZEN = [*range(5), 9, 10, 11]
"""Steps in which one layer is frozen: at first, and once more after it has been trained for some steps."""
LATE = 2
"""Number of that layer in the net."""


def train(model: nn.Module, optimizer: Any, ranks: list[int], steps: range) -> list[Tensor]:
    """The layer's weights after each step; with more than one rank, those of training on their average loss."""
    made = []
    for step in steps:
        layer = plain_module(model)[LATE]
        if not isinstance(model, DistributedDataParallel):
            layer.requires_grad_(step not in FROZEN)
        take(optimizer, torch.stack([loss_of(model, rank, step) for rank in ranks]).mean())
        made.append(layer.weight.detach().clone())
    return made


def compressed(group: LocalGroup, compressor: Any, first: int) -> tuple[list[Tensor], dict[str, bytes], float]:
    """The layer's changes at each step, in learning rates, if it is trained from this step on."""
    model = make_net()
    model[LATE].requires_grad_(False)
    optimizer = make("AdamW", model, compressor, group=group, warmup_steps=2, weight_decay=0.0)
    weights = [model[LATE].weight.detach().clone()]
    for step in range(first + 8):
        model[LATE].requires_grad_(step >= first)
        take(optimizer, loss_of(model, group.rank, step))
        weights.append(model[LATE].weight.detach().clone())
    changes = [(after - before) / ADAMW["lr"] for before, after in pairwise(weights)]
    return changes, weight_bits(model), optimizer.second_moment_scale[f"{LATE}.weight"]


def rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


@pytest.mark.parametrize("spec", ["default", TOPK])
def test_the_first_updates_are_those_of_a_new_training(spec: str) -> None:
    found = run_threads(compressed, 2, thinwire.Policy(spec, min_numel=100), 5)
    assert identical([bits for _, bits, _ in found])
    changes, _, scale = found[0]
    new = run_threads(compressed, 2, thinwire.Policy(spec, min_numel=100), 0)[0][0]
    assert not any(bool(change.any()) for change in changes[:5])
    for change in changes[5:7]:
        assert float(change.abs().max()) < 1.01, "torch's step"
        assert rms(change) > 0.5, "of all elements"
    for change in changes[7:]:
        assert 0.5 < rms(change) < 2.5
    assert rms(torch.stack(changes[5:]).sum(0)) == pytest.approx(rms(torch.stack(new).sum(0)), rel=0.3)
    assert 0.5 <= scale < 1, "measured at the end of its own warm-up"


class Run:
    def __init__(self, group: LocalGroup, kind: str = "AdamW") -> None:
        self.group, self.model = group, make_net()
        self.optimizer = make(kind, self.model, group=group, warmup_steps=3)

    def train(self, first: int, last: int) -> None:
        train(self.model, self.optimizer, [self.group.rank], range(first, last))

    def saved(self) -> bytes:
        return written({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, *saved: bytes) -> None:
        states = [read(one) for one in saved]
        self.model.load_state_dict(states[0]["model"])
        self.optimizer.load_state_dict([state["optimizer"] for state in states])


def resume(group: LocalGroup, kind: str, when: int) -> dict[str, bytes]:
    whole, resumed = Run(group, kind), Run(group, kind)
    whole.train(0, when)
    stays = weight_bits(whole.model[LATE]) == weight_bits(make_net()[LATE])
    assert stays == (when == 4)
    resumed.load(whole.saved())
    for run in (whole, resumed):
        run.train(when, 15)
    assert_same(optimizer_bits(whole.optimizer), optimizer_bits(resumed.optimizer), f"resumed at {when}")
    return weight_bits(resumed.model)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_resume_has_the_same_bits(kind: str) -> None:
    """Frozen, in its own warm-up, after it, and frozen again."""
    for when in (4, 6, 8, 10):
        assert identical(run_threads(resume, 2, kind, when)), when


def go_on(group: LocalGroup, saved: list[bytes]) -> tuple[dict[str, bytes], Any]:
    """Go on from what all ranks saved; without that, return what to save."""
    run = Run(group)
    if not saved:
        run.train(0, 6)
        return {}, run.saved()
    run.load(*saved)
    run.train(6, 9)
    return weight_bits(run.model), run.optimizer.torch_state_dict()["state"][LATE]["step"]


def test_another_number_of_ranks_goes_on_in_its_warm_up() -> None:
    """Its momentum is the same on all ranks there, and must stay so."""
    found = run_threads(go_on, 3, [saved for _, saved in run_threads(go_on, 2, [])])
    assert identical([bits for bits, _ in found])
    assert {float(step) for _, step in found} == {4.0}, "its own steps"


DAMAGES: list[tuple[dict[str, Any], str]] = [
    ({"family_of": {f"{LATE}.weight": 7}}, f"'{LATE}.weight' has no family"),
    ({"families": []}, "do not fit"),
    ({"weights": [None, None]}, "TypeError"),
    ({"count": None}, "TypeError"),
    ({"local": None}, "'local' is no list"),
    ({"scales": []}, "AttributeError"),
]


def load_damaged(group: LocalGroup) -> None:
    first = Run(group)
    first.train(0, 6)
    saved = copy.deepcopy(first.optimizer.state_dict())
    first.train(6, 7)
    before = optimizer_bits(first.optimizer)
    for damage, word in DAMAGES:
        damaged = {**saved, "thinwire": {**saved["thinwire"], **damage}}
        with raises(DamagedError, word, "damaged"):
            first.optimizer.load_state_dict(damaged)
        assert_same(before, optimizer_bits(first.optimizer), str(damage))
        assert first.optimizer.sync.steps == 7


def test_damaged_families_change_nothing() -> None:
    run_threads(load_damaged, 2)


def from_torch(group: LocalGroup) -> Tensor:
    """torch's state has a number of steps for each parameter."""
    model = make_net()
    theirs = torch.optim.AdamW(model.parameters(), **ADAMW)
    train(model, theirs, [0, 1], range(7))
    optimizer = make("AdamW", model, "none", group=group, warmup_steps=0)
    optimizer.load_state_dict(theirs.state_dict())
    train(model, optimizer, [group.rank], range(7, 9))
    back = optimizer.torch_state_dict()["state"]
    assert (float(back[0]["step"]), float(back[LATE]["step"])) == (9.0, 4.0)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_the_steps_of_torchs_state_are_taken() -> None:
    model = make_net()
    train(model, torch.optim.AdamW(model.parameters(), **ADAMW), [0, 1], range(9))
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    for found in run_threads(from_torch, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def by_ddp(rank: int, world_size: int, trained: bool) -> dict[str, bytes]:
    """Frozen before a resume and trained after it, or the other way round: DDP then does not exchange it."""
    module = make_net()
    optimizers = []
    for trains, steps in ((not trained, range(4)), (trained, range(4, 8))):
        before = module[LATE].requires_grad_(trains).weight.detach().clone()
        model = DistributedDataParallel(module)
        optimizers.append(make("AdamW", model, policy(TOPK), warmup_steps=2))
        if len(optimizers) == 2:
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        after, *_, end = train(model, optimizers[-1], [rank], steps)
    if trained:
        lr = ADAMW["lr"]
        assert 0.5 * lr < float((after - before).abs().median()) < 1.5 * lr
    else:
        assert torch.equal(before, end), "it takes no step"
        kept = optimizers[1].state_dict()
        assert [float(kept["state"][number]["step"]) for number in (0, LATE)] == [8.0, 4.0]
        number = kept["thinwire"]["family_of"][f"{LATE}.weight"]
        assert kept["thinwire"]["weights"][number] == optimizers[0].state_dict()["thinwire"]["weights"][0]
    return weight_bits(model)


@pytest.mark.parametrize("trained", [True, False], ids=["new", "frozen"])
def test_after_a_resume_with_ddp(ranks: RankPool, trained: bool) -> None:
    assert identical(ranks.run(by_ddp, 2, trained))
