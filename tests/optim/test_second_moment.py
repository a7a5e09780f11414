"""AdamW's second moments: each rank's own, averaged now and then, and the bytes of that."""

import copy
from typing import Any

import torch
from torch import Tensor

import thinwire
from support.group import run_group
from support.oracle import bytes_of
from support.training import Given, gradients, loss_of, make_net, policy, seeded, take
from thinwire.optim.second_moment import _AT_ONCE

TOPK = "topk:ratio=1/16,bits=4,chunk=512"


def second_moments(optimizer: thinwire.AdamW) -> Tensor:
    state = optimizer.state_dict()["state"]
    return torch.cat([kept["exp_avg_sq"].view(-1) for kept in state.values()])


def follow(rank: int, world_size: int, group: Any = None) -> list[tuple[bytes, int]]:
    """After each step: the second moments, and the bytes sent in it."""
    model = make_net()
    optimizer = thinwire.AdamW(model, compressor=policy(TOPK), warmup_steps=4, refresh_every=40, group=group)
    found = []
    for step in range(85):
        take(optimizer, loss_of(model, rank, step))
        found.append((bytes_of(second_moments(optimizer)), optimizer.sync.stats.last_bytes_sent))
    return found


def test_ranks_average_them_at_doublings_and_then_regularly() -> None:
    one, other = run_group(follow, 2)
    alike = [step for step in range(1, 86) if one[step - 1][0] == other[step - 1][0]]
    assert alike == [1, 2, 3, 4, 16, 32, 40, 80]
    for found in (one, other):
        plain = found[50][1]
        assert all(found[step - 1][1] > plain + 10_000 // 2 for step in (16, 32, 40, 80)), "bytes must be counted"


def of_many_tensors(rank: int, world_size: int, group: Any = None) -> list[dict[str, bytes]]:
    """Second moments after a step before the refresh, and after the refresh; more tensors than are averaged at once."""
    model = Given((300, 700, 5000, 41, 900, 2000, 1, 333, 4096, 512, 77, 64, 8000, 10, 129, 650, 2, 31, 1024))
    everything = thinwire.Policy("topk:ratio=1/4,bits=4,chunk=512", min_numel=0)
    optimizer = thinwire.AdamW(model, compressor=everything, warmup_steps=2, refresh_every=20, group=group)
    found = []
    for step in range(1, 17):
        take(optimizer, model(gradients(model, rank, step)))
        if step >= 15:
            seconds = optimizer._parameters.vectors["exp_avg_sq"].named()
            assert len(seconds) == len(model.weights) > 2 * _AT_ONCE
            found.append({name: bytes_of(v) for name, v in seconds.items()})
    return found


def test_all_of_many_tensors_are_averaged() -> None:
    found = run_group(of_many_tensors, 3)
    for before, after in found[1:]:
        assert all(before[name] != found[0][0][name] for name in before), "each rank follows its own"
        assert [name for name in after if after[name] != found[0][1][name]] == []


def resume_frozen(rank: int, world_size: int, group: Any = None) -> tuple[bytes, bytes]:
    """The weights of a run, and those of one that was saved and loaded long after its second moments were frozen."""
    runs = []
    for _ in range(2):
        model = Given((5000, 8192))
        options: dict[str, Any] = {"compressor": TOPK, "warmup_steps": 4, "refresh_every": 0, "betas": (0.9, 0.99)}
        runs.append((model, thinwire.AdamW(model, group=group, **options)))
    (model, optimizer), (other, resumed) = runs
    for step in range(24):
        if step == 4:
            frozen = optimizer._parameters.vectors["exp_avg_sq"]["weights.0"].clone()
        if step == 20:
            other.load_state_dict(model.state_dict())
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, its_optimizer in runs if step >= 20 else runs[:1]:
            take(its_optimizer, each(gradients(each, rank, step)))
    assert torch.equal(frozen, optimizer._parameters.vectors["exp_avg_sq"]["weights.0"]), "without refresh they stay"
    return tuple(b"".join(bytes_of(weight.detach()) for weight in each.weights) for each, _ in runs)  # type: ignore


def test_a_frozen_one_is_loaded_as_it_was() -> None:
    for whole, resumed in run_group(resume_frozen, 2):
        assert whole == resumed


def rare(rank: int, world_size: int, refresh_every: int, group: Any = None) -> float:
    """A row of an embedding that the warm-up never saw comes late."""
    with seeded(0):
        model = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))
    optimizer = thinwire.AdamW(
        model, lr=1e-3, compressor=policy("topk:ratio=1/4"), warmup_steps=10, refresh_every=refresh_every, group=group
    )
    start = model[0].weight.detach().clone()
    for step in range(60):
        generator = torch.Generator().manual_seed(2 * step + rank)
        tokens = torch.randint(0, 64 if step > 40 else 63, (32,), generator=generator)
        if step > 40:
            tokens[0] = 63
        take(optimizer, torch.nn.functional.cross_entropy(model(tokens), tokens))
    return float((model[0].weight.detach() - start)[63].abs().max())


def test_a_row_that_comes_late_takes_no_leap() -> None:
    """In 19 steps at 1e-3, Adam's own would move it by some hundredths."""
    for refresh_every in (0, 20):
        for moved in run_group(rare, 2, refresh_every):
            assert 1e-4 < moved < 0.5, refresh_every
