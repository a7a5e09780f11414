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


def chosen(device: torch.device = CPU) -> str:
    return kernels.select(layout(), device)[0]


def test_chosen_by_device_unless_forced_and_back() -> None:
    assert kernels.backends() == ("cpu", "cuda", "reference")
    assert thinwire.compressor("topk:ratio=1/64,bits=2").compress(torch.ones(8192)).kernels == "cpu"
    assert chosen(META) == "reference", "the only one for any device"
    with kernels.force("reference"):
        assert chosen() == "reference"
        for name in ("cpu", None):
            with kernels.force(name):
                assert chosen() == "cpu"
        assert chosen() == "reference"
    assert chosen() == "cpu"
    with pytest.raises(ZeroDivisionError), kernels.force("reference"):
        1 / 0  # noqa: B018
    assert chosen() == "cpu"


def test_forces_of_overlapping_threads_do_not_outlive_them() -> None:
    first, second = kernels.force("reference"), kernels.force("cpu")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert chosen() == "cpu"
    second.__exit__(None, None, None)
    with kernels.force("reference"):
        assert chosen() == "reference"


def test_unknown_name() -> None:
    for name in ("gpu", "", "Reference", "numba"):
        expected = f"unknown backend '{name}'; choose one of cpu, cuda, reference .*THINWIRE_KERNELS"
        with pytest.raises(ValueError, match=expected), kernels.force(name):
            pass
        with pytest.raises(ValueError, match=expected):
            kernels.register_kernel(name, DenseLayout, kernels.select(layout("none"), CPU)[1])


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "gpu")
    residual = torch.ones(8192)
    with pytest.raises(ValueError, match="unknown backend 'gpu'"):
        thinwire.compressor("quantize").compress(torch.ones(8192), residual)
    assert torch.equal(residual, torch.ones(8192))
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "")
    assert chosen() == "cpu", "an empty variable chooses nothing"
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "reference")
    assert chosen() == "reference"
    with kernels.force("cpu"):
        assert chosen() == "cpu", "force comes before the environment"


def test_kernels_refuse_another_device() -> None:
    for spec in ("topk:ratio=1/64,bits=2", "quantize", "none"):
        expected = "backend 'cpu' runs on cpu tensors, given one on meta"
        with kernels.force("cpu"), pytest.raises(ValueError, match=expected):
            thinwire.compressor(spec).compress(torch.empty(8192, device="meta"), key=1)
    for backend, device in (("cpu", META), ("cuda", CPU), ("cuda", META)):
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


def test_kernels_of_an_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default takes what there is; forcing what there is not still raises."""
    monkeypatch.setattr(kernels, "_MODULES", {name: dict(each) for name, each in kernels._MODULES.items()})
    own, (_, kernel) = OwnLayout(4, torch.float32), kernels.select(layout("none"), CPU)
    with pytest.raises(ValueError, match="no backend has a kernel for OwnLayout; register one for 'reference'"):
        kernels.select(own, CPU)
    kernels.register_kernel("reference", OwnLayout, kernel)
    assert kernels.select(own, CPU) == ("reference", kernel)
    with kernels.force("cpu"), pytest.raises(ValueError, match="has no kernel for OwnLayout; use 'reference'"):
        kernels.select(own, CPU)


def test_without_numba_nothing_falls_back() -> None:
    """Numba missing: the default raises and says what to do; who asks for the reference gets it."""
    code = """
        import sys
        sys.modules["numba"] = None
        import torch, thinwire
        for spec in ("topk:ratio=1/64,bits=2", "quantize"):
            residual = torch.ones(8192)
            try:
                thinwire.compressor(spec).compress(torch.ones(8192), residual, key=1)
            except RuntimeError as error:
                assert "backend 'cpu' cannot be loaded: " in str(error) and "numba" in str(error), error
                assert "THINWIRE_KERNELS=reference" in str(error) and residual.eq(1).all(), error
            else:
                raise AssertionError("fell back")
            with thinwire.kernels.force("reference"):
                print(thinwire.compressor(spec).compress(torch.ones(8192), key=1).kernels)
        """
    assert run_python(code).split() == ["reference"] * 2


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
