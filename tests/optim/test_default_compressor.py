"""compressor="default" between ranks: chosen by their number, and anew by those who resume a run; nothing is lost."""

from typing import Any

import torch
from torch import Tensor

import thinwire
from support.training import Given, average, gradients, identical, residuals, take, weight_bits
from thinwire import Collective, default_compressor, format_spec
from thinwire.collectives import cost
from thinwire.testing import RankPool

SIZES = (40_000, 10, 9000, 300)
BEFORE, AFTER = 6, 5
SMALL = 310


def make(model: Given) -> Any:
    return thinwire.SGD(model, 0.5, collective=Collective(algorithm="gather"))


def all_residuals(sync: thinwire.Synchronizer) -> dict[str, Tensor]:
    """The average over ranks of their residuals; one that has just loaded may have none."""
    mine = residuals(sync)
    names = [f"weights.{number}" for number in range(len(SIZES))]
    zeros = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    return {name: average(mine.get(name, zero)) for name, zero in zip(names, zeros, strict=True)}


def train(rank: int, model: Given, optimizer: Any, steps: range) -> None:
    for step in steps:
        take(optimizer, model(gradients(model, rank, step)))


def save(rank: int, world_size: int) -> dict[str, Any]:
    model = Given(SIZES)
    optimizer = make(model)
    train(rank, model, optimizer, range(BEFORE))
    kept = all_residuals(optimizer.sync)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "residuals": kept}


def go_on(rank: int, world_size: int, saved: list[dict[str, Any]]) -> dict[str, bytes]:
    model = Given(SIZES)
    model.load_state_dict(saved[0]["model"])
    optimizer = make(model)
    optimizer.load_state_dict([state["optimizer"] for state in saved])
    wanted = default_compressor(world_size)
    assert optimizer.sync.policy.final == wanted
    assert optimizer.state_dict()["thinwire"]["compressor"] == format_spec(wanted)
    for name, kept in all_residuals(optimizer.sync).items():
        assert kept.any()
        torch.testing.assert_close(kept, saved[0]["residuals"][name], rtol=1e-5, atol=1e-5)
    train(rank, model, optimizer, range(BEFORE, BEFORE + AFTER))
    run = sum(SIZES[:3])  # the last ones first, and the small one between two large ones lies in their run
    expected = cost.gather(default_compressor(world_size, BEFORE + AFTER - 1), run, torch.float32, world_size).sent
    expected += cost.gather(thinwire.Quantize(bits=8), SMALL, torch.float32, world_size).sent
    assert optimizer.sync.stats.last_bytes_sent == expected
    return weight_bits(model)


def test_another_number_of_ranks_has_its_own_and_loses_nothing(ranks: RankPool) -> None:
    before, after = 2, 3
    saved = ranks.run(save, before)
    assert default_compressor(before) != default_compressor(after)
    for state in saved:
        kept = state["optimizer"]["thinwire"]
        assert kept["compressor"] == format_spec(default_compressor(before))
        assert kept["policy"]["compressor"] == "default"
    assert identical(ranks.run(go_on, after, saved))
