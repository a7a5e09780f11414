"""Spec strings and the registry: one text that means one compressor, everywhere."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import pytest
import torch

import thinwire
from support.processes import run_python
from thinwire import Compressor, Quantize, RandomK, TopK
from thinwire.compressors import spec as spec_module
from thinwire.kernels.layout import DenseLayout


def test_canonical_form() -> None:
    for spec, canonical in (
        ("topk:ratio=1/64", "topk:ratio=1/64,bits=32,chunk=4096"),
        ("topk:ratio=1%,bits=2", "topk:ratio=0.01,bits=2,chunk=4096"),
        ("topk:bits=2,chunk=none,ratio=0.015625", "topk:ratio=1/64,bits=2,chunk=none"),
        ("quantize", "quantize:bits=8,block=256"),
        ("randomk:ratio=100%", "randomk:ratio=1,seed=0"),
        ("none", "none"),
    ):
        assert thinwire.format_spec(thinwire.compressor(spec)) == canonical


def test_a_ratio_is_exact_however_it_is_written() -> None:
    for ratio in (0.01, "0.01", "1%", "1/100", "1e-2", " 1% ", "2/200", Fraction(1, 100)):
        assert TopK(ratio).ratio == Fraction(1, 100), ratio
        assert TopK(ratio) == TopK("1%")
    for ratio, kept in (("1/64", 64), ("1%", 41), ("1/256", 16), ("1", 4096), ("1/5000", 1)):
        assert TopK(ratio).kept(4096) == kept, ratio


WRONG_RATIOS = [0, 0.0, -0.01, 1.5, "0%", "101%", "1/0", "2/1", "", "%", "a", "1/64/2", float("nan"), None, True]


def refused(make: Callable[..., object], message: str, *values: object, **named: object) -> None:
    with pytest.raises(ValueError, match=message):
        make(*values, **named)


def test_a_ratio_of_a_billion_digits_is_refused_at_once() -> None:
    """A frame may hold one. In another process: the power of ten would never be done, and nothing could stop it."""
    code = """
        import thinwire
        for text in ("1e-5000", "1e-99999999%", "1e-999999999", "1e999999999"):
            try:
                thinwire.compressor("topk:ratio=" + text)
            except ValueError as error:
                assert "expected a share above 0" in str(error), error
                print("refused", end=" ")
        """
    assert run_python(code, time_limit=20) == "refused refused refused refused"


def test_wrong_ratio_bits_chunk_block_and_seed() -> None:
    for cls, ratio in product((TopK, RandomK), WRONG_RATIOS):
        refused(cls, r"ratio .*, expected a share above 0 and up to 1, such as 0\.01, '1%'", ratio)
    for bits in (0, 3, 5, 64, -1, True, 2.0, "2", None):
        refused(TopK, r"bits .*, expected one of 1, 2, 4, 8, 16, 32", "1/64", bits=bits)
        refused(Quantize, r"bits .*, expected one of 1, 2, 4, 8", bits)
    for chunk in (0, 8, 100, 4095, 1 << 17, -16, 4096.0, "4096"):
        refused(TopK, r"chunk .*, expected one of 16, 32, .*65536, none", "1/64", chunk=chunk)
    for block in (0, 16, 100, 1 << 17, None):
        refused(Quantize, r"block .*, expected one of 32, 64", 8, block=block)
    for seed in (-1, 1 << 64, 1.0, True, None):
        refused(RandomK, r"seed .*, expected a whole number from 0 to 2\*\*64 - 1", "1/64", seed=seed)


WRONG_SPECS = {
    "": "compressor '' in '' is unknown; known are none, quantize, randomk, topk",
    "gzip": "compressor 'gzip' in 'gzip' is unknown; known are",
    "TopK:ratio=1": "compressor 'TopK' .* is unknown",
    "topk": "'topk' lacks ratio; for example topk:ratio=1/64",
    "topk:bits=2": "'topk:bits=2' lacks ratio",
    "topk:": "'' in 'topk:' is not an option of topk; expected key=value with a key of: ratio, bits, chunk",
    "topk:ratio": "'ratio' in .* is not an option",
    "topk:ratio=1/64,": "'' in .* is not an option",
    "topk:ratio=1/64,width=3": "'width=3' in .* is not an option",
    "topk:ratio=1/64,stats=3": "'stats=3' in .* is not an option",
    "none:bits=2": "'bits=2' in 'none:bits=2' is not an option of none; .* a key of: none",
    "topk:ratio=1/64,ratio=1/32": "'ratio' is given twice",
    "topk:ratio=two": "ratio='two' in .*, expected a share above 0",
    "topk:ratio=1/64,bits=two": "bits='two' in .*, expected a whole number",
    "topk:ratio=1/64,bits=2.0": "bits='2.0' in .*, expected a whole number",
    "topk:ratio=1/64,bits=": "bits='' in .*, expected a whole number",
    "topk:ratio=1/64,bits=none": "bits='none' in .*, expected a whole number",
    "topk:ratio=1/64,chunk=all": "chunk='all' in .*, expected a whole number or none",
    "topk:ratio=1/64,bits=3": "bits 3, expected one of",
    "topk:ratio=1/64,bits=²": "bits='²' in .*, expected a whole number",
    f"randomk:ratio=1,seed={'9' * 5000}": "expected a whole number",
}


def test_wrong_spec() -> None:
    for spec, message in WRONG_SPECS.items():
        refused(thinwire.compressor, message, spec)
    for given in (None, 64, b"topk"):
        refused(thinwire.compressor, "expected a Compressor or a spec", given)
    expected = "'?stochastic.*: leave it out: stochastic rounding was removed, and a residual keeps"
    refused(Quantize, expected, 8, rounding="stochastic")
    for spec in ("quantize:bits=8,rounding=stochastic,seed=3", "topk:ratio=1/64,rounding=stochastic"):
        refused(thinwire.compressor, expected, spec)


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_module, "REGISTRY", thinwire.registered())


@pytest.mark.usefixtures("_own_registry")
def test_a_new_compressor_works_everywhere(backend: str) -> None:
    @thinwire.register_compressor("plain")
    @dataclass(frozen=True)
    class Plain(Compressor):
        level: int = 3

        def _layout(self, numel: int, dtype: torch.dtype) -> DenseLayout:
            return DenseLayout(numel, dtype)

    compressor = thinwire.compressor("plain")
    assert compressor == Plain(3)
    assert thinwire.format_spec(compressor) == "plain:level=3"
    assert thinwire.registered()["plain"] is Plain
    read = thinwire.CompressedTensor.from_bytes(compressor.compress(torch.ones(5)).to_bytes())
    assert read.compressor == compressor
    assert torch.equal(read.decompress(), torch.ones(5))


@pytest.mark.usefixtures("_own_registry")
def test_what_the_registry_refuses() -> None:
    for name in ("", "Top", "top-k", "a b", "top:k", "1st"):
        refused(thinwire.register_compressor(name), r"compressor name .*, expected lower-case letters", TopK)
    refused(thinwire.register_compressor("topk"), "compressor name 'topk' is taken by TopK", RandomK)
    assert thinwire.register_compressor("topk")(TopK) is TopK  # a module that is loaded again

    class Loose(TopK):
        pass

    Loose.__dataclass_params__ = dataclasses.make_dataclass("Thawed", [])().__dataclass_params__

    @dataclass(frozen=True)
    class Odd(TopK):
        weights: dict = dataclasses.field(default_factory=dict)

    for cls, message in (
        (Loose, "Loose must be a frozen dataclass"),
        (type("Plain", (), {}), "must be a frozen dataclass"),
        (Odd, r"Odd\.weights: type <class 'dict'>, expected one of"),
    ):
        with pytest.raises(TypeError, match=message):
            thinwire.register_compressor("odd")(cls)
    assert "odd" not in thinwire.registered()
