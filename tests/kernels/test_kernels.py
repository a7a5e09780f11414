"""Which kernels run: an explicit choice, that can be forced, and that nothing replaces in silence."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import thinwire
from support.processes import run_python
from thinwire import kernels
from thinwire.kernels.layout import DenseLayout, Layout

CPU, META = torch.device("cpu"), torch.device("meta")


def layout(spec: str = "topk:ratio=1/64,bits=2", numel: int = 8192) -> Layout:
    return thinwire.compressor(spec).layout(numel, torch.float32)


def test_order_of_preference() -> None:
    assert kernels.backends() == ("cpu", "cuda", "reference")
    assert kernels.select(layout(), CPU)[0] == "cpu"
    assert kernels.select(layout(), META)[0] == "reference", "the only one for any device"


def test_what_is_not_forced_is_chosen_by_device() -> None:
    ct = thinwire.compressor("topk:ratio=1/64,bits=2").compress(torch.ones(8192))
    assert ct.kernels == "cpu"


def test_force_and_back() -> None:
    with kernels.force("reference"):
        assert kernels.select(layout(), CPU)[0] == "reference"
        with kernels.force("cpu"):
            assert kernels.select(layout(), CPU)[0] == "cpu"
        with kernels.force(None):
            assert kernels.select(layout(), CPU)[0] == "cpu"
        assert kernels.select(layout(), CPU)[0] == "reference"
    assert kernels.select(layout(), CPU)[0] == "cpu"
    with pytest.raises(ZeroDivisionError), kernels.force("reference"):
        1 / 0  # noqa: B018
    assert kernels.select(layout(), CPU)[0] == "cpu"


@pytest.mark.parametrize("name", ["gpu", "", "Reference", "numba"])
def test_unknown_name(name: str) -> None:
    expected = f"unknown backend '{name}'; choose one of cpu, cuda, reference .*THINWIRE_KERNELS"
    with pytest.raises(ValueError, match=expected), kernels.force(name):
        pass
    with pytest.raises(ValueError, match=expected):
        kernels.register_kernel(name, DenseLayout, kernels.select(layout("none"), CPU)[1])


def test_unknown_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "gpu")
    residual = torch.ones(8192)
    with pytest.raises(ValueError, match="unknown backend 'gpu'"):
        thinwire.compressor("quantize").compress(torch.ones(8192), residual)
    assert torch.equal(residual, torch.ones(8192))
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "")
    assert kernels.select(layout(), CPU)[0] == "cpu", "an empty variable chooses nothing"


def test_force_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "reference")
    assert kernels.select(layout(), CPU)[0] == "reference"
    with kernels.force("cpu"):
        assert kernels.select(layout(), CPU)[0] == "cpu"


@pytest.mark.parametrize("spec", ["topk:ratio=1/64,bits=2", "quantize", "none"])
def test_cpu_kernels_refuse_another_device(spec: str) -> None:
    with kernels.force("cpu"), pytest.raises(ValueError, match="backend 'cpu' runs on cpu tensors, given one on meta"):
        thinwire.compressor(spec).compress(torch.empty(8192, device="meta"), key=1)


@pytest.mark.parametrize(("backend", "device"), [("cpu", META), ("cuda", CPU), ("cuda", META)])
def test_kernels_of_adam_refuse_another_device(backend: str, device: torch.device) -> None:
    expected = f"backend '{backend}' runs on {backend} tensors, given one on {device}"
    with kernels.force(backend), pytest.raises(ValueError, match=expected):
        kernels.adam(device)


def test_a_forced_backend_is_not_replaced_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Without a kernel for RandomK, long chunks, float64 or long blocks: the log has what runs instead, and why."""
    cuda = torch.device("cuda")
    cases = [
        ("cuda", "topk:ratio=1/64", torch.float64, "float64"),
        ("cuda", "quantize:block=16384", torch.float32, "blocks of 16384"),
        *((name, "topk:ratio=1/64,chunk=none", torch.float32, f"chunks of {1 << 20}") for name in ("cuda", "cpu")),
        *((name, "topk:ratio=1/64,chunk=32768", torch.float32, "chunks of 32768") for name in ("cuda", "cpu")),
        *((name, "randomk:ratio=1/64", torch.float32, "RandomK") for name in ("cuda", "cpu")),
    ]
    kernels._warn_of_replacement.cache_clear()
    for name, spec, dtype, reason in cases:
        made, device = thinwire.compressor(spec).layout(1 << 20, dtype), torch.device(name)
        caplog.clear()
        with kernels.force(name):
            assert kernels.select(made, device)[0] == kernels.select(made, device)[0] == "reference", spec
        (logged,) = caplog.messages
        assert f"backend '{name}' was chosen" in logged
        assert "'reference'" in logged
        assert reason in logged
        if name == "cpu":
            assert kernels.select(made, device)[0] == "reference", "unless forced, in silence"
            assert len(caplog.messages) == 1
    with kernels.force("cuda"):
        caplog.clear()
        kernels._warn_of_replacement.cache_clear()
        assert kernels.adam(cuda, torch.float64).__name__ == "thinwire.kernels.reference.adam"
        assert "float64" in caplog.messages[0]


@dataclass(frozen=True)
class OwnLayout(DenseLayout):
    """A layout that no backend knows."""


class TestOwnKernels:
    @pytest.fixture(autouse=True)
    def _own_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "_MODULES", {name: dict(each) for name, each in kernels._MODULES.items()})

    def test_none_for_a_layout(self) -> None:
        own = OwnLayout(4, torch.float32)
        with pytest.raises(ValueError, match="no backend has a kernel for OwnLayout; register one for 'reference'"):
            kernels.select(own, CPU)
        with kernels.force("cpu"), pytest.raises(ValueError, match="has no kernel for OwnLayout; use 'reference'"):
            kernels.select(own, CPU)

    def test_registered_for_reference_only(self) -> None:
        """The default takes what there is; forcing what there is not still raises."""
        kernel = kernels.select(layout("none"), CPU)[1]
        kernels.register_kernel("reference", OwnLayout, kernel)
        assert kernels.select(OwnLayout(4, torch.float32), CPU) == ("reference", kernel)
        with kernels.force("cpu"), pytest.raises(ValueError, match="has no kernel for OwnLayout"):
            kernels.select(OwnLayout(4, torch.float32), CPU)

    def test_one_that_does_not_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(kernels._MODULES["cpu"], type(layout()), "thinwire.kernels.cpu.no_such_module")
        residual = torch.ones(8192)
        with pytest.raises(RuntimeError, match=r"backend 'cpu' cannot be loaded: .*THINWIRE_KERNELS=reference"):
            thinwire.compressor("topk:ratio=1/64,bits=2").compress(torch.ones(8192), residual)
        assert torch.equal(residual, torch.ones(8192))


def test_without_numba_nothing_falls_back() -> None:
    """Numba missing: the default raises and says what to do; who asks for the reference gets it."""
    code = """
        import sys
        sys.modules["numba"] = None
        import torch, thinwire
        for spec in ("topk:ratio=1/64,bits=2", "quantize"):
            try:
                thinwire.compressor(spec).compress(torch.ones(8192), key=1)
            except RuntimeError as error:
                assert "numba" in str(error) and "THINWIRE_KERNELS=reference" in str(error), error
            else:
                raise AssertionError("fell back")
            with thinwire.kernels.force("reference"):
                print(thinwire.compressor(spec).compress(torch.ones(8192), key=1).kernels)
        """
    assert run_python(code).split() == ["reference"] * 2


def test_environment_variable() -> None:
    code = "import torch, thinwire; print(thinwire.Quantize(8).compress(torch.ones(8192)).kernels)"
    assert run_python(code, THINWIRE_KERNELS="reference") == "reference"


def test_importing_has_no_side_effects() -> None:
    """`thinwire --help` must not wait for torch, nor the reference for Numba."""
    code = """
        import sys, thinwire
        assert not {"torch", "numba", "numpy"} & set(sys.modules), "import thinwire"
        import logging, thinwire.compressors, thinwire.compressors.frame, torch
        assert not logging.getLogger("thinwire").handlers, "logging was set up"
        with thinwire.kernels.force("reference"):
            thinwire.compressor("topk:ratio=1/64").compress(torch.ones(8192)).to_bytes()
        assert "numba" not in sys.modules, "the reference loaded Numba"
        """
    run_python(code)


COMPRESS_AND_COUNT = """
    import json, sys, torch, thinwire
    c = thinwire.compressor("topk:ratio=1/64,bits=2")
    ct = c.compress(torch.ones(8192), torch.zeros(8192))
    assert ct.kernels == "cpu"
    c.accumulate(ct, torch.zeros(8192))

    import thinwire.kernels.cpu.quantize  # not compiled before it is called
    from numba.core.dispatcher import Dispatcher
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("thinwire.kernels.cpu")]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)]
    holding = [str(each) for each in found if not each.targetoptions.get("nogil")]
    assert found and not holding, f"these hold the GIL: {holding}"
    hits, misses = (sum(sum(getattr(d.stats, of).values()) for d in found) for of in ("cache_hits", "cache_misses"))
    print(json.dumps([hits, misses]))
    """


@pytest.mark.slow
def test_cpu_kernels_are_compiled_once_and_release_the_gil(tmp_path: Path) -> None:
    """The second process finds on disk what the first one compiled."""
    _, misses = json.loads(run_python(COMPRESS_AND_COUNT, NUMBA_CACHE_DIR=str(tmp_path)))
    assert misses > 0, "the first process did not compile: the test shows nothing"
    assert list(tmp_path.rglob("*.nbc")), "nothing on disk"
    hits, misses = json.loads(run_python(COMPRESS_AND_COUNT, NUMBA_CACHE_DIR=str(tmp_path)))
    assert hits > 0
    assert misses == 0, f"{misses} functions were compiled again"
