"""The order of samples, and random numbers by place: functions of the seed and the place, and of nothing else."""

from hashlib import blake2b

import pytest
import torch

from thinwire.tools.train.draws import below, normal, numbers, order


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    epochs = order(3, 50, 0, 250).split(50)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(50))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 5
    assert not torch.equal(order(4, 50, 0, 50), epochs[0])


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("sizes", [(1,), (5, 8), (30, 2, 100)])
def test_pieces_of_the_stream_fit_together(length: int, sizes: tuple[int, ...]) -> None:
    whole, start = order(0, length, 0, 400), 0
    while start < 300:
        for size in sizes:
            assert torch.equal(order(0, length, start, size), whole[start : start + size])
            start += size


def test_the_place_is_all_there_is() -> None:
    """Nobody has drawn what stands before, and other streams were drawn in between."""
    far = order(5, 1000, 123_456_789, 1500)
    for seed in range(4):
        order(seed, 1000, 0, 1)
    assert torch.equal(order(5, 1000, 123_456_789, 1500), far)


def test_what_is_kept_cannot_be_changed() -> None:
    first = order(6, 10, 0, 10)
    kept = first.clone()
    first.zero_()
    assert torch.equal(order(6, 10, 0, 10), kept)


def test_numbers_depend_on_seed_end_and_place() -> None:
    places = torch.arange(100, 110)
    drawn = numbers(1, "noise", places, 4)
    assert torch.equal(torch.cat([numbers(1, "noise", part, 4) for part in places.split(3)]), drawn)
    assert torch.equal(numbers(1, "noise", places.flip(0), 6)[:, :4].flip(0), drawn)
    assert len(set(drawn.flatten().tolist())) == 40
    for other in (numbers(2, "noise", places, 4), numbers(1, "shift", places, 4), numbers(1, "noise", places + 10, 4)):
        assert not (other == drawn).any()


def test_numbers_are_those_of_splitmix64() -> None:
    """In whole numbers without a limit, as the paper has them."""
    whole, golden = 1 << 64, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % whole
        z = (z ^ z >> 27) * 0x94D049BB133111EB % whole
        return z ^ z >> 31

    places = [0, 1, 5, 10**9, 2**40 + 3, 2**62]
    for seed in (0, 7, 2**64):
        key = int.from_bytes(blake2b(f"noise/{seed}".encode(), digest_size=8).digest(), "big")
        rows = [mix(key ^ place * golden % whole) for place in places]
        expected = [[mix((row + column * golden) % whole) >> 32 for column in range(1, 6)] for row in rows]
        assert numbers(seed, "noise", torch.tensor(places), 5).tolist() == expected


def test_drawing_leaves_the_places_alone() -> None:
    places = torch.arange(10)
    numbers(0, "noise", places, 3)
    assert torch.equal(places, torch.arange(10))


def test_numbers_are_spread_evenly() -> None:
    places = torch.arange(20_000)
    counts = below(9, 0, "shift", places, 2).flatten().bincount(minlength=9)
    assert len(counts) == 9
    assert (counts / 40_000 - 1 / 9).abs().max() < 0.01
    drawn = normal(0, "noise", places, 8)
    assert drawn.dtype == torch.float32
    assert drawn.mean().item() == pytest.approx(0, abs=0.01)
    assert drawn.std().item() == pytest.approx(1, abs=0.01)
    assert (drawn.abs() < 1).float().mean().item() == pytest.approx(0.6827, abs=0.01)
    for one, other in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        assert (one * other).mean().item() == pytest.approx(
            0, abs=0.02
        )  # neighbours have nothing to do with each other


def test_any_whole_number_is_a_seed() -> None:
    seeds = [0, -1, 2**32, 2**64, 2**64 - 1, 10**30]
    assert len({tuple(order(seed, 100, 0, 100).tolist()) for seed in seeds}) == len(seeds)
