"""Random numbers of RandomK: a pure function of seed and key, apart from everybody else's, and right on average."""

import random
from itertools import product

import numpy as np
import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, KEY, SPECS, make_input
from support.oracle import bytes_of

DRAWING = SPECS["randomk"]


def draw(spec: str, key: int) -> bytes:
    return bytes_of(thinwire.compressor(spec).compress(make_input("normal", 4097, torch.float32)[0], key=key).payload)


def test_seed_and_key_decide_what_is_drawn() -> None:
    """A key is a whole number of any kind, as step counters come from NumPy and torch too."""
    for spec in DRAWING:
        assert thinwire.compressor(spec).draws
        assert draw(spec, KEY) == draw(spec, np.int64(KEY)) == draw(spec, torch.tensor(KEY)), spec
        keys = (KEY, 0, KEY + 1, -KEY, KEY + (1 << 32), (1 << 63) + KEY)
        assert len({draw(spec, key) for key in keys}) == len(keys), f"{spec}: keys share their draws"
        for wrong in (1.5, "1", torch.tensor(1.5)):
            with pytest.raises((TypeError, ValueError)):
                draw(spec, wrong)
        unseeded, seeds = spec.partition(",seed")[0], (0, 1, 2, 1 << 32, (1 << 64) - 1)
        drawn = {draw(f"{unseeded},seed={seed}", KEY) for seed in seeds}
        assert len(drawn) == len(seeds), f"{spec}: seeds share their draws"


def test_other_generators_are_left_alone(backend: str) -> None:
    for spec in ALL_SPECS:
        compressor = thinwire.compressor(spec)
        tensor, residual = make_input("normal", 4097, torch.float32)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        ct = compressor.compress(tensor, residual, key=KEY)
        compressor.accumulate(ct, ct.decompress())
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0]), f"{spec}: torch's generator moved"
        assert before[1:] == after[1:], f"{spec}: Python's or NumPy's generator moved"


def test_unbiased_without_a_residual() -> None:
    """The mean of n draws misses the tensor by what n draws miss by chance, element by element."""
    tensor, draws = torch.linspace(-1, 1, 96), 1500
    for spec in DRAWING:
        compressor = thinwire.compressor(spec)
        decoded = torch.stack([compressor.compress(tensor, key=key).decompress() for key in range(draws)]).double()
        error, by_chance = decoded.mean(0) - tensor, decoded.std(0) / draws**0.5
        assert (error.abs() <= 5 * by_chance + 2e-4).all(), (
            f"{spec}: off by {(error / by_chance).abs().max():.1f} sigma"
        )
        assert decoded.std(0).mean() > 0, f"{spec}: nothing was drawn"


def test_randomk_positions_are_those_of_the_document() -> None:
    """docs/wire-format.md, in plain integers: other programs must draw the same."""
    compressor = thinwire.RandomK("1/7", seed=9)
    for numel, key in product((1, 100, 4097, 100_003), (0, 1, (1 << 63) + 5)):
        ct = compressor.compress(torch.ones(numel), torch.zeros(numel), key=key)
        k = -(-numel // 7)
        width, wider = divmod(numel, k)
        expected = []
        for stratum in range(k):
            z = (ct.key + stratum * 0x9E3779B97F4A7C15) % (1 << 64)  # Vigna's splitmix64, without the first increment
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                z = (z ^ z >> shift) * factor % (1 << 64)
            drawn = (z ^ z >> 31) >> 1
            start = stratum * width + min(stratum, wider)
            expected.append(start + ((drawn >> 32) * (width + (stratum < wider)) >> 31))
        assert ct.decompress().nonzero().view(-1).tolist() == expected, (numel, key)
