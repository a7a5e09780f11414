"""AdamW's second moments: each rank's own, averaged now and then; and c, which turns them into those of the average."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from support.group import run_group
from support.oracle import bytes_of
from support.training import Given, differing, gradients, policy, seeded, take
from thinwire.collectives import LocalGroup
from thinwire.optim.second_moment import _AT_ONCE, for_ranks
from thinwire.testing import RankPool, run_threads

SIZES = (200, 250, 30_000)
"""Of the first two all elements are sampled."""
NOISE = (0.1, 2.0, 1.0)
TOPK = "topk:ratio=1/16,bits=4,chunk=512"


def parts(rank: int, step: int) -> list[Tensor]:
    """A signal that all ranks have, and noise of each rank's own: more of it in some tensors than in others."""
    made = []
    for number, (size, noise) in enumerate(zip(SIZES, NOISE, strict=True)):
        signal = torch.randn(size, generator=torch.Generator().manual_seed(number))
        own = torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + number + 100))
        made.append(signal + noise * own)
    return made


def defined(gradients: Sequence[Sequence[Tensor]]) -> list[float]:
    """mean(ḡ²) / mean over ranks of mean(gᵢ²), for every tensor, from the gradients of all ranks."""
    found = []
    for tensors in zip(*gradients, strict=True):
        together = torch.stack(tensors).double()
        c = float(together.mean(dim=0).square().mean() / together.square().mean())
        found.append(min(1.0, max(1 / len(tensors), c)))
    return found


def make(model: Given, group: Any, **options: Any) -> thinwire.AdamW:
    return thinwire.AdamW(model, **{"lr": 1e-3, "compressor": policy(TOPK), "warmup_steps": 2, **options}, group=group)


def measure(
    rank: int, world_size: int, steps: Sequence[int], options: dict[str, Any], group: Any = None
) -> dict[int, list[float]]:
    """c after some steps, in the order of the tensors."""
    model, given = Given(SIZES), dict(options)
    passes, scale, left_out = given.pop("passes", 1), given.pop("scale", None), given.pop("left_out", None)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    if given.pop("mesh", False):
        group = init_device_mesh("cpu", (2, world_size // 2))
    optimizer = make(model, group, grad_scaler=scaler, **given)
    found = {}
    for step in range(1, max(steps) + 1):
        optimizer.zero_grad()
        for _ in range(passes):
            loss = model([part / passes for part in parts(rank, step)])
            (loss if scaler is None else scaler.scale(loss)).backward()
        if step == left_out:
            optimizer.exchange()
        elif scaler is None:
            optimizer.step()
        else:
            optimizer.exchange()
            scaler.step(optimizer)
            scaler.update()
        if step in steps:
            found[step] = [optimizer.second_moment_scale[f"weights.{number}"] for number in range(len(SIZES))]
    return found


@pytest.mark.parametrize(
    ("world_size", "how"),
    [(3, {}), (2, {"scale": 256.0}), (2, {"passes": 3}), (2, {"max_grad_norm": 20.0}), (4, {"mesh": True})],
    ids=str,
)
def test_it_is_what_it_is_defined_to_be(ranks: RankPool, world_size: int, how: dict[str, Any]) -> None:
    """At the end of the warm-up as measured, at a refresh half of it; by gradients as they are clipped, of all ranks of
    all nodes. Also between processes, where it is plain."""

    def clipped(rank: int, step: int) -> list[Tensor]:
        given, limit = parts(rank, step), world_size**0.5 * how.get("max_grad_norm", torch.inf)
        norm = float(torch.cat(given).double().norm())
        return [part * min(1.0, limit / norm) for part in given]

    by_threads = how and "mesh" not in how
    for found in (run_group if by_threads else ranks.run)(measure, world_size, (2, 3, 16), how):
        first, later = (defined([clipped(rank, step) for rank in range(world_size)]) for step in (2, 16))
        assert found[2] == found[3], "it changes at refreshes only"
        for number in (0, 1):
            assert found[2][number] == pytest.approx(first[number], rel=1e-4)
            assert found[16][number] == pytest.approx((first[number] + later[number]) / 2, rel=1e-4)
        assert found[2][2] == pytest.approx(first[2], rel=0.25), "of a sample"
        assert found[2][0] > 0.9, "hardly any noise"
        assert found[2][1] < 0.7, "mostly noise"


def train(group: LocalGroup, steps: Iterable[int], given: Any = parts, saved: Any = None, freeze: Any = None) -> Any:
    """Train a model by what each step is given, from the states of ranks, or with its first tensor frozen at first."""
    model = Given(SIZES)
    optimizer = make(model, group)
    if saved is not None:
        optimizer.load_state_dict(saved)
    for step in steps:
        model.weights[0].requires_grad_(freeze is None or step >= freeze)
        take(optimizer, model(given(group.rank, step)))
    return optimizer


def test_it_is_at_least_that_of_noise() -> None:
    """Steps would have no limit if it could come near 0: gradients that nearly cancel each other."""

    def cancelling(rank: int, step: int) -> list[Tensor]:
        return [(-1.0 if rank else 1.001) * part for part in parts(0, step)]

    for found in run_threads(lambda group: train(group, (1, 2, 3), cancelling), 2):
        assert set(found.second_moment_scale.values()) == {0.5}


def test_frozen_parameters() -> None:
    """A parameter without a gradient, and one whose gradient is 0, have no scale; also after a resume."""

    def some(rank: int, step: int) -> list[Tensor]:
        given = parts(rank, step)
        return [given[0], torch.zeros_like(given[1]), given[2]]

    for found in run_threads(lambda group: train(group, (1, 2, 3), some, freeze=9), 2):
        scales = found.second_moment_scale
        assert [name for name, c in scales.items() if c < 1] == ["weights.2"]
        assert list(scales) == ["weights.1", "weights.2"]
        assert found.state_dict()["thinwire"]["scales"] == scales


def test_another_number_of_ranks_measures_again_at_once() -> None:
    saved = run_threads(lambda group: train(group, range(1, 5)).state_dict(), 2)
    before = saved[0]["thinwire"]["scales"]
    for ranks in (2, 3):
        found = defined([parts(rank, 5) for rank in range(ranks)])
        loaded = {name: for_ranks(c, 2, ranks) for name, c in before.items()}
        assert (loaded == before) == (ranks == 2)
        assert run_threads(lambda group: train(group, (), saved=saved).second_moment_scale, ranks) == [loaded] * ranks
        for optimizer in run_threads(lambda group: train(group, [5], saved=saved), ranks):
            for number in (0, 1):
                name, after = f"weights.{number}", optimizer.second_moment_scale
                expected = loaded[name] if ranks == 2 else (loaded[name] + found[number]) / 2
                assert after[name] == pytest.approx(expected, rel=1e-4)


def test_more_ranks_average_more_of_the_noise_away() -> None:
    """All noise, all signal, and half of each."""
    for c, before, after, expected in ((0.5, 2, 8, 1 / 8), (1.0, 2, 8, 1.0), (0.75, 2, 4, 0.5 + 0.5 / 4)):
        assert for_ranks(c, before, after) == pytest.approx(expected)
    assert for_ranks(for_ranks(0.6, 2, 16), 16, 2) == pytest.approx(0.6)


def test_a_parameter_that_is_trained_later_has_its_own() -> None:
    """Measured at its second step, which is the last of its own warm-up; the others again at their sixteenth."""
    steps = {"weights.0": [6], "weights.1": [2, 16]}
    for found in run_threads(lambda group: train(group, range(1, 17), freeze=5), 2):
        for number, (name, measured) in enumerate(steps.items()):
            values = [defined([parts(rank, step) for rank in range(2)])[number] for step in measured]
            assert found.second_moment_scale[name] == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_the_end_of_the_warm_up_is_seen_though_a_step_was_left_out() -> None:
    """`zero_grad` drops what was exchanged."""
    for found in run_group(measure, 2, (5,), {"warmup_steps": 3, "left_out": 2}):
        assert found[5][1] == pytest.approx(defined([parts(rank, 4) for rank in range(2)])[1], rel=1e-4)


MANY = (300, 700, 5000, 41, 900, 2000, 1, 333, 4096, 512, 77, 64, 8000, 10, 129, 650, 2, 31, 1024)
"""More tensors than are averaged at once."""


def follow(rank: int, world_size: int, group: Any = None) -> list[tuple[dict[str, bytes], int]]:
    """After each step: the second moments, and the bytes sent in it."""
    model, found = Given(MANY), []
    everything = policy("topk:ratio=1/4,bits=4,chunk=512", min_numel=0)
    optimizer = make(model, group, compressor=everything, warmup_steps=4, refresh_every=40)
    for step in range(85):
        take(optimizer, model(gradients(model, rank, step)))
        seconds = optimizer._parameters.vectors["exp_avg_sq"].named()
        found.append(({name: bytes_of(v) for name, v in seconds.items()}, optimizer.sync.stats.last_bytes_sent))
    assert len(seconds) == len(MANY) > 2 * _AT_ONCE
    return found


def test_ranks_average_them_at_doublings_and_then_regularly() -> None:
    one, *others = run_group(follow, 3)
    plain = one[50][1]
    for step in range(1, 86):
        for other in others:
            differ = differing(one[step - 1][0], other[step - 1][0])
            is_averaged = step <= 4 or step in (16, 32, 40, 80)
            assert differ == ([] if is_averaged else sorted(one[0][0])), f"step {step}: each rank follows its own"
        if step in (16, 32, 40, 80):
            assert one[step - 1][1] > plain + sum(MANY) // 2, "bytes must be counted"


def rare(rank: int, world_size: int, refresh_every: int, group: Any = None) -> float:
    """A row of an embedding that the warm-up never saw comes late."""
    with seeded(0):
        model = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))
    optimizer = thinwire.AdamW(
        model, lr=1e-3, compressor=policy("topk:ratio=1/4"), warmup_steps=10, refresh_every=refresh_every, group=group
    )
    start = model[0].weight.detach().clone()
    for step in range(60):
        if step == 10:
            warm = optimizer._parameters.vectors["exp_avg_sq"]["0.weight"].clone()
        generator = torch.Generator().manual_seed(2 * step + rank)
        tokens = torch.randint(0, 64 if step > 40 else 63, (32,), generator=generator)
        if step > 40:
            tokens[0] = 63
        take(optimizer, torch.nn.functional.cross_entropy(model(tokens), tokens))
    assert torch.equal(warm, optimizer._parameters.vectors["exp_avg_sq"]["0.weight"]) == (refresh_every == 0)
    return float((model[0].weight.detach() - start)[63].abs().max())


def test_a_row_that_comes_late_takes_no_leap() -> None:
    """In 19 steps at 1e-3, Adam's own would move it by some hundredths."""
    for refresh_every in (0, 20):
        for moved in run_group(rare, 2, refresh_every):
            assert 1e-4 < moved < 0.5, refresh_every
