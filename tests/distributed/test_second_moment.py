"""AdamW's second moments: each rank's own, averaged now and then, and the bytes of that."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training import Given, gradients, loss_of, make_net, policy

import thinwire
from oracle import bytes_of
from ranks import Ranks
from thinwire.optim.adamw import _AT_ONCE

TOPK = "topk:ratio=1/16,bits=4,chunk=512"


def second_moments(optimizer: thinwire.AdamW) -> Tensor:
    state = optimizer.state_dict()["state"]
    return torch.cat([kept["exp_avg_sq"].view(-1) for kept in state.values()])


def are_alike(rank: int, world_size: int) -> list[tuple[bool, int]]:
    """After each step: whether all ranks have the same second moments, and the bytes sent in it."""
    model = make_net()
    optimizer = thinwire.AdamW(model, compressor=policy(TOPK), warmup_steps=4, refresh_every=40)
    found = []
    for step in range(85):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        mine = second_moments(optimizer)
        others = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(others, mine)
        found.append((all(torch.equal(mine, other) for other in others), optimizer.sync.stats.last_bytes_sent))
    return found


def test_ranks_average_them_at_doublings_and_then_regularly(ranks: Ranks) -> None:
    for found in ranks.run(are_alike, 2):
        alike = [step for step, (same, _) in enumerate(found, start=1) if same]
        assert alike == [1, 2, 3, 4, 16, 32, 40, 80]
        plain = found[50][1]
        assert all(found[step - 1][1] > plain + 10_000 // 2 for step in (16, 32, 40, 80)), "bytes must be counted"


def of_many_tensors(rank: int, world_size: int) -> list[dict[str, bytes]]:
    """Second moments after a step before the refresh, and after the refresh; more tensors than are averaged at once."""
    model = Given((300, 700, 5000, 41, 900, 2000, 1, 333, 4096, 512, 77, 64, 8000, 10, 129, 650, 2, 31, 1024))
    everything = thinwire.Policy("topk:ratio=1/4,bits=4,chunk=512", min_numel=0)
    optimizer = thinwire.AdamW(model, compressor=everything, warmup_steps=2, refresh_every=20)
    found = []
    for step in range(1, 17):
        optimizer.zero_grad()
        model(gradients(model, rank, step)).backward()
        optimizer.step()
        if step >= 15:
            seconds = optimizer._vectors["exp_avg_sq"].named()
            assert len(seconds) == len(model.weights) > 2 * _AT_ONCE
            found.append({name: bytes_of(v) for name, v in seconds.items()})
    return found


def test_all_of_many_tensors_are_averaged(ranks: Ranks) -> None:
    found = ranks.run(of_many_tensors, 3)
    for before, after in found[1:]:
        assert all(before[name] != found[0][0][name] for name in before), "each rank follows its own"
        assert [name for name in after if after[name] != found[0][1][name]] == []


def freeze(rank: int, world_size: int) -> bool:
    """Whether the second moments of what is compressed are those of the warm-up for ever."""
    model = make_net()
    optimizer = thinwire.AdamW(model, compressor=policy(TOPK), warmup_steps=4, refresh_every=0)
    kept = []
    for step in range(30):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        kept.append(
            {n: v.clone() for n, v in optimizer._vectors["exp_avg_sq"].named().items() if n.endswith("2.weight")}
        )
    return all(torch.equal(kept[3][name], kept[29][name]) for name in kept[3])


def test_without_refresh_they_stay(ranks: Ranks) -> None:
    assert ranks.run(freeze, 2) == [True, True]


def rare(rank: int, world_size: int, refresh_every: int) -> float:
    """A row of an embedding that the warm-up never saw comes late."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))
    optimizer = thinwire.AdamW(
        model, lr=1e-3, compressor=policy("topk:ratio=1/4"), warmup_steps=10, refresh_every=refresh_every
    )
    start = model[0].weight.detach().clone()
    for step in range(60):
        tokens = torch.randint(
            0, 64 if step > 40 else 63, (32,), generator=torch.Generator().manual_seed(2 * step + rank)
        )
        if step > 40:
            tokens[0] = 63
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
    return float((model[0].weight.detach() - start)[63].abs().max())


@pytest.mark.parametrize("refresh_every", [0, 20], ids=["frozen", "refreshed"])
def test_a_row_that_comes_late_takes_no_leap(ranks: Ranks, refresh_every: int) -> None:
    """In 19 steps at 1e-3, Adam's own would move it by some hundredths."""
    for moved in ranks.run(rare, 2, refresh_every):
        assert 1e-4 < moved < 0.5
