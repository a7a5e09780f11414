"""Random spec strings: a compressor that round-trips, or a ValueError that says what is wrong."""

import pickle

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import thinwire
from support.cases import DTYPES
from support.samples import bounded
from thinwire import Quantize, RandomK, TopK

NAMES = sorted(thinwire.registered())
WORDS = ["ratio", "bits", "chunk", "block", "rounding", "seed", "none", "1/64", "1%", "0.01", "4"]
PIECES = st.one_of(st.sampled_from([*NAMES, *WORDS, ":", "=", ",", "", " ", "-", "/"]), st.text(max_size=4))

ratios = st.one_of(
    st.fractions(min_value=0, max_value=1, max_denominator=1 << 48).filter(bool).map(str),
    st.floats(min_value=1e-9, max_value=1).map(repr),
    st.integers(1, 100).map(lambda percent: f"{percent}%"),
)
seeds = st.integers(0, (1 << 64) - 1)
valid = st.one_of(
    st.just(thinwire.NoCompression()),
    st.builds(
        TopK,
        ratios,
        bits=st.sampled_from([1, 2, 4, 8, 16, 32]),
        chunk=st.one_of(st.none(), st.integers(4, 16).map(lambda exponent: 1 << exponent)),
    ),
    st.builds(RandomK, ratios, seed=seeds),
    st.builds(Quantize, st.sampled_from([1, 2, 4, 8]), block=st.integers(5, 16).map(lambda exponent: 1 << exponent)),
)


def round_trips(compressor: thinwire.Compressor) -> None:
    spec = thinwire.format_spec(compressor)
    assert spec.isascii()
    assert len(spec) < 1 << 16, "would not fit the frame's header"
    assert thinwire.compressor(spec) == compressor == pickle.loads(pickle.dumps(compressor))
    assert hash(thinwire.compressor(spec)) == hash(compressor)
    assert thinwire.format_spec(thinwire.compressor(spec)) == spec
    assert thinwire.compressor(compressor) is compressor


def round_trips_or_is_refused(text: str) -> None:
    try:
        compressor = thinwire.compressor(text)
    except ValueError:
        return
    round_trips(compressor)


@bounded(500)
@given(st.lists(PIECES, max_size=8).map("".join))
@example("topk:ratio=1/64,bits=٢")
@example("topk:ratio=٢/64")
@example("topk:ratio=1_0/6_4")
@example("quantize:bits=08")
@example("randomk:ratio=1/64,seed=-0")
@example("topk:ratio= 1/64")
def test_any_text(spec: str) -> None:
    round_trips_or_is_refused(spec)


@bounded(400)
@given(valid, st.integers(0, 200), st.sampled_from([*"0123456789abcxyz:=,/.%- "]), st.booleans())
def test_one_character_changed(compressor: thinwire.Compressor, at: int, character: str, insert: bool) -> None:
    spec = thinwire.format_spec(compressor)
    at %= len(spec)
    round_trips_or_is_refused(spec[:at] + character + spec[at + (not insert) :])


@bounded(400)
@given(valid, st.integers(0, 1 << 48), st.sampled_from(DTYPES))
def test_every_compressor_round_trips_and_never_exceeds_dense(
    compressor: thinwire.Compressor, numel: int, dtype: torch.dtype
) -> None:
    round_trips(compressor)
    assert 0 <= compressor.nbytes(numel, dtype) <= numel * dtype.itemsize
