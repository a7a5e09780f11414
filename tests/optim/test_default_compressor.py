"""compressor="default": chosen by the number of ranks, and anew by those who resume a run; nothing is lost."""

from typing import Any

import torch

import thinwire
from support.training import Given, gradients, identical, residuals, take, weight_bits
from thinwire import Collective, default_compressor, format_spec
from thinwire.collectives import LocalGroup, cost
from thinwire.testing import run_threads

SIZES = (40_000, 10, 9000, 300)
BEFORE, AFTER = 6, 5


def train(group: LocalGroup, states: list[dict[str, Any]]) -> dict[str, Any]:
    """Train for some steps, at first or from what all ranks saved; the residuals are those of the change."""
    model = Given(SIZES)
    optimizer = thinwire.SGD(model, 0.5, collective=Collective(algorithm="gather"), group=group)
    if states:
        model.load_state_dict(states[0]["model"])
        optimizer.load_state_dict([state["optimizer"] for state in states])
        kept = residuals(optimizer.sync)
    for step in range(BEFORE, BEFORE + AFTER) if states else range(BEFORE):
        take(optimizer, model(gradients(model, group.rank, step)))
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "residuals": kept if states else residuals(optimizer.sync),
        "bits": weight_bits(model),
        "sent": optimizer.sync.stats.last_bytes_sent,
    }


def test_another_number_of_ranks_has_its_own_and_loses_nothing() -> None:
    before, after = 2, 3
    assert default_compressor(before) != default_compressor(after)
    saved = run_threads(train, before, [])
    found = run_threads(train, after, saved)
    for ranks, states in ((before, saved), (after, found)):
        for state in states:
            kept = state["optimizer"]["thinwire"]
            assert kept["compressor"] == format_spec(default_compressor(ranks))
            assert kept["policy"]["compressor"] == "default"
    run = sum(SIZES[:3])  # the last ones first, and the small one between two large ones lies in their run
    expected = cost.gather(default_compressor(after, BEFORE + AFTER - 1), run, torch.float32, after).sent
    expected += cost.gather(thinwire.Quantize(bits=8), 310, torch.float32, after).sent
    assert [state["sent"] for state in found] == [expected] * after
    for name in saved[0]["residuals"]:
        here = sum(state["residuals"].get(name, torch.zeros(())) for state in found) / after
        there = sum(state["residuals"][name] for state in saved) / before
        assert there.any()
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)
    assert identical(state["bits"] for state in found)
