"""Spec strings and the registry: one text that means one compressor, everywhere."""

import dataclasses
import pickle
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

import thinwire
from support.cases import ALL_SPECS
from support.processes import run_python
from thinwire import Compressor, Quantize, RandomK, TopK
from thinwire.compressors import spec as spec_module
from thinwire.kernels.layout import DenseLayout


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_round_trip(spec: str) -> None:
    compressor = thinwire.compressor(spec)
    text = thinwire.format_spec(compressor)
    assert thinwire.compressor(text) == compressor
    assert thinwire.format_spec(thinwire.compressor(text)) == text
    assert hash(thinwire.compressor(text)) == hash(compressor)
    assert pickle.loads(pickle.dumps(compressor)) == compressor
    assert thinwire.compressor(compressor) is compressor


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("topk:ratio=1/64", "topk:ratio=1/64,bits=32,chunk=4096"),
        ("topk:ratio=1%,bits=2", "topk:ratio=0.01,bits=2,chunk=4096"),
        ("topk:bits=2,chunk=none,ratio=0.015625", "topk:ratio=1/64,bits=2,chunk=none"),
        ("quantize", "quantize:bits=8,block=256,rounding=nearest,seed=0"),
        ("randomk:ratio=100%", "randomk:ratio=1,seed=0"),
        ("none", "none"),
    ],
)
def test_canonical_form(spec: str, canonical: str) -> None:
    assert thinwire.format_spec(thinwire.compressor(spec)) == canonical


@pytest.mark.parametrize("ratio", [0.01, "0.01", "1%", "1/100", "1e-2", " 1% ", "2/200", Fraction(1, 100)])
def test_a_ratio_is_exact_however_it_is_written(ratio: object) -> None:
    assert TopK(ratio).ratio == Fraction(1, 100)
    assert TopK(ratio) == TopK("1%")


@pytest.mark.parametrize(("ratio", "kept"), [("1/64", 64), ("1%", 41), ("1/256", 16), ("1", 4096), ("1/5000", 1)])
def test_the_next_whole_number_up_is_kept(ratio: str, kept: int) -> None:
    assert TopK(ratio).kept(4096) == kept


WRONG_RATIOS = [0, 0.0, -0.01, 1.5, "0%", "101%", "1/0", "2/1", "", "%", "a", "1/64/2", float("nan"), None, True]


@pytest.mark.parametrize("ratio", WRONG_RATIOS, ids=repr)
@pytest.mark.parametrize("cls", [TopK, RandomK])
def test_wrong_ratio(cls: type, ratio: object) -> None:
    with pytest.raises(ValueError, match=r"ratio .*, expected a share above 0 and up to 1, such as 0\.01, '1%'"):
        cls(ratio)


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


@pytest.mark.parametrize("bits", [0, 3, 5, 64, -1, True, 2.0, "2", None], ids=repr)
def test_wrong_bits(bits: object) -> None:
    with pytest.raises(ValueError, match=r"bits .*, expected one of 1, 2, 4, 8, 16, 32"):
        TopK("1/64", bits=bits)
    with pytest.raises(ValueError, match=r"bits .*, expected one of 1, 2, 4, 8"):
        Quantize(bits)


@pytest.mark.parametrize("chunk", [0, 8, 100, 4095, 1 << 17, -16, 4096.0, "4096"], ids=repr)
def test_wrong_chunk(chunk: object) -> None:
    with pytest.raises(ValueError, match=r"chunk .*, expected one of 16, 32, .*65536, none"):
        TopK("1/64", chunk=chunk)


@pytest.mark.parametrize("block", [0, 16, 100, 1 << 17, None], ids=repr)
def test_wrong_block(block: object) -> None:
    with pytest.raises(ValueError, match=r"block .*, expected one of 32, 64"):
        Quantize(8, block=block)


def test_wrong_rounding_and_seed() -> None:
    with pytest.raises(ValueError, match="rounding 'up', expected one of nearest, stochastic"):
        Quantize(8, rounding="up")
    for seed in (-1, 1 << 64, 1.0, True, None):
        with pytest.raises(ValueError, match=r"seed .*, expected a whole number from 0 to 2\*\*64 - 1"):
            RandomK("1/64", seed=seed)
    with pytest.raises(ValueError, match="seed 3 with rounding nearest, which draws nothing; expected seed 0"):
        Quantize(8, seed=3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "compressor '' in '' is unknown; known are none, quantize, randomk, topk"),
        ("gzip", "compressor 'gzip' in 'gzip' is unknown; known are"),
        ("TopK:ratio=1", "compressor 'TopK' .* is unknown"),
        ("topk", "'topk' lacks ratio; for example topk:ratio=1/64"),
        ("topk:bits=2", "'topk:bits=2' lacks ratio"),
        ("topk:", "'' in 'topk:' is not an option of topk; expected key=value with a key of: ratio, bits, chunk"),
        ("topk:ratio", "'ratio' in .* is not an option"),
        ("topk:ratio=1/64,", "'' in .* is not an option"),
        ("topk:ratio=1/64,width=3", "'width=3' in .* is not an option"),
        ("topk:ratio=1/64,stats=3", "'stats=3' in .* is not an option"),
        ("none:bits=2", "'bits=2' in 'none:bits=2' is not an option of none; .* a key of: none"),
        ("topk:ratio=1/64,ratio=1/32", "'ratio' is given twice"),
        ("topk:ratio=two", "ratio='two' in .*, expected a share above 0"),
        ("topk:ratio=1/64,bits=two", "bits='two' in .*, expected a whole number"),
        ("topk:ratio=1/64,bits=2.0", "bits='2.0' in .*, expected a whole number"),
        ("topk:ratio=1/64,bits=", "bits='' in .*, expected a whole number"),
        ("topk:ratio=1/64,bits=none", "bits='none' in .*, expected a whole number"),
        ("topk:ratio=1/64,chunk=all", "chunk='all' in .*, expected a whole number or none"),
        ("topk:ratio=1/64,bits=3", "bits 3, expected one of"),
        ("topk:ratio=1/64,bits=²", "bits='²' in .*, expected a whole number"),
        (f"quantize:seed={'9' * 5000}", "expected a whole number"),
    ],
)
def test_wrong_spec(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thinwire.compressor(spec)


class TestRegister:
    """The registry checks what is put into it; each test has a registry of its own."""

    @pytest.fixture(autouse=True)
    def _own_registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spec_module, "REGISTRY", thinwire.registered())

    def test_a_new_compressor_works_everywhere(self, backend: str) -> None:
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

    @pytest.mark.parametrize("name", ["", "Top", "top-k", "a b", "top:k", "1st"])
    def test_wrong_name(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"compressor name .*, expected lower-case letters"):
            thinwire.register_compressor(name)(TopK)

    def test_taken_name(self) -> None:
        with pytest.raises(ValueError, match="compressor name 'topk' is taken by TopK"):
            thinwire.register_compressor("topk")(RandomK)
        assert thinwire.register_compressor("topk")(TopK) is TopK  # a module that is loaded again

    def test_not_a_frozen_dataclass(self) -> None:
        class Loose(TopK):
            pass

        Loose.__dataclass_params__ = dataclasses.make_dataclass("Thawed", [])().__dataclass_params__
        with pytest.raises(TypeError, match="Loose must be a frozen dataclass"):
            thinwire.register_compressor("loose")(Loose)
        with pytest.raises(TypeError, match="must be a frozen dataclass"):
            thinwire.register_compressor("plain")(type("Plain", (), {}))

    def test_field_without_a_text_form(self) -> None:
        @dataclass(frozen=True)
        class Odd(TopK):
            weights: dict = dataclasses.field(default_factory=dict)

        with pytest.raises(TypeError, match=r"Odd\.weights: type <class 'dict'>, expected one of"):
            thinwire.register_compressor("odd")(Odd)
        assert "odd" not in thinwire.registered()
