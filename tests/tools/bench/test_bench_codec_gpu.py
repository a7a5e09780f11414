"""`thinwire bench codec --device cuda` on a machine without a GPU: its arguments, its rows, its table, and its checks.

The kernels themselves run here in Triton's interpreter, and tests/gpu has the whole command.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinwire
from support.processes import run_python
from support.slow import slow
from thinwire import kernels
from thinwire.kernels.cpu import adam as cpu_adam
from thinwire.kernels.updates import AdamUpdate
from thinwire.tools import cli
from thinwire.tools.bench.codec import Options, show
from thinwire.tools.bench.codec.cases import default_specs, plan
from thinwire.tools.bench.codec.check import check_update
from thinwire.tools.bench.codec.measurement import ADVANCE, WRITE, measure
from thinwire.tools.bench.harness import Failure, Progress
from thinwire.tools.bench.measure import Call, Timing

HERE = Path(__file__).parent
CONDITIONS = {
    "device": "cuda", "device_name": "H200", "device_cache": 50 << 20, "driver": "580.1", "cuda": "13", "triton": "3.6",
}  # fmt: skip
TOPK = "topk:ratio=1/64,bits=2"


def timing(milliseconds: float) -> Timing:
    return {"p20": 0.9 * milliseconds, "p50": milliseconds, "p80": 1.1 * milliseconds, "samples": 50}


class MadeUp:
    """A clock that makes each call once, and says that it took a millisecond."""

    def time(self, calls: Mapping[str, tuple[Call, bool]], samples: int, sets: int) -> dict[str, Timing]:
        for call, _ in calls.values():
            call(sets - 1)
        return {name: timing(1.0) for name in calls}

    def peak(self, call: Call) -> int | None:
        return 100


# Arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--device cuda, but torch finds no CUDA device"),
        (["--repeats", "0"], "--repeats 0, expected 1 or more"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "codec", "--device", "cuda", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("thinwire bench codec: error: ")
    assert message in output.err


def test_without_the_packages_of_the_command_line() -> None:
    code = """
        import sys
        for name in ("tyro", "rich", "numba", "sklearn"):
            sys.modules[name] = None
        from thinwire.tools.bench.codec import on_gpu, run
        import thinwire.tools.bench.codec.measurement, torch
        torch.cuda.is_available = lambda: False
        try:
            run(on_gpu())
        except ValueError as error:
            print(error)
        """
    assert run_python(code) == "--device cuda, but torch finds no CUDA device"


def test_defaults_are_those_of_the_device() -> None:
    assert Options.defaults(["--device", "cuda"]).sizes == ("25M", "268435456")
    assert Options.defaults(["--device=cuda"]).repeats == 50
    assert Options.defaults([]) == Options()
    assert {thinwire.compressor(spec).name for spec in default_specs("cuda")} == set(thinwire.registered())
    assert default_specs("cuda")[0] == "topk:ratio=1/64,bits=2"


# Rows and the table -------------------------------------------------------------------------------------------------


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with kernels.force("reference"):
        rows = list(measure(plan([TOPK], ["64k"], ["bfloat16"])[0], {TOPK}, MadeUp(), 50, Progress(9)))
    json.dumps(rows, allow_nan=False)
    show([{**row, "device": "cuda"} for row in rows], CONDITIONS)
    first, empty, title, heading, _, add, *rest = capsys.readouterr().out.splitlines()
    assert first == "H200, driver 580.1, CUDA 13, Triton 3.6"
    assert empty == ""
    assert title == "64,000 x bfloat16 (0.128 MB)"
    assert heading.split()[:4] == ["call", "p20", "p50", "ms"]
    assert add.split() == ["residual.add_(grad)", "0.900", "1.00", "1.10", "0.640", "1.00", "0.1%", "torch"]
    compress = next(line for line in rest if line.startswith("compress"))
    assert compress.split()[:3] == ["compress", TOPK, "*"]  # the reference cannot be captured
    assert any("stay in the device's cache" in line for line in rest)


# Measuring ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _two_passes() -> Iterator[None]:
    with kernels.force("reference"):
        yield


PARTS = ("compress", "encode", "commit", "decode 1 x", "decode 8 x", "accumulate")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.usefixtures("_two_passes")
def test_every_row_of_a_size(dtype: str) -> None:
    """With the reference kernels: which rows there are, in which order, with which bytes."""
    (case,) = plan(["topk:ratio=1/64,bits=2", "quantize:bits=8", "randomk:ratio=1/64"], ["64k"], [dtype])
    rows = list(measure(case, {TOPK}, MadeUp(), 50, Progress(9)))
    wide = ["the same in float32"] if dtype != "float32" else []
    assert [row["name"] for row in rows] == [
        "residual.add_(grad)", *wide, "out.zero_()", "copy", "torch: add topk gather clear per chunk, 1/64",
        "torch.topk, 1/64", "torch: add topk gather fp16 clear, 1/64",
        *(f"{part} {TOPK}" for part in PARTS),
        "compress quantize:bits=8",
        "compress randomk:ratio=1/64",
        WRITE, ADVANCE,
    ]  # fmt: skip
    compress = next(row for row in rows if row["name"].startswith("compress topk"))
    assert compress["kernel"] == "thinwire.kernels.reference.topk"
    assert compress["payload_bytes"] == case.compressors[TOPK].nbytes(64_000, case.dtype)
    add_bytes = {"float32": 12, "bfloat16": 10, "float64": 24}[dtype]
    assert compress["moved_bytes"] == pytest.approx(add_bytes + compress["payload_bytes"] / 64_000)
    assert compress["of_floor"] == pytest.approx(compress["moved_bytes"] / 12)  # at the speed of float32
    assert compress["of_add"] == pytest.approx(compress["moved_bytes"] / add_bytes)
    assert compress["torch_topk_ms"] == compress["torch_ms"] == timing(1.0)
    assert compress["gb_per_s"] == pytest.approx(compress["moved_bytes"] * 64_000 / 1e-3 / 1e9)
    assert compress["working_bytes"] == 100
    assert not compress["graph"]  # the reference waits for the device
    by_name = {row["name"]: row for row in rows}
    assert by_name["compress quantize:bits=8"]["torch_ms"] is None
    assert by_name[f"decode 8 x {TOPK}"]["of_floor"] == 1.0
    assert by_name[WRITE]["moved_bytes"] == {"float32": 16, "bfloat16": 14, "float64": 32}[dtype]
    assert by_name[ADVANCE]["moved_bytes"] == {"float32": 28, "bfloat16": 26, "float64": 56}[dtype]
    assert by_name[WRITE]["kernel"] == by_name[ADVANCE]["kernel"] == "thinwire.kernels.reference.adam"
    assert all(row["speedup"] is None for row in rows if not row["name"].startswith("compress"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
@pytest.mark.parametrize("spec", ["topk:ratio=1/64,bits=2", slow("quantize:bits=8")])
def test_in_the_interpreter(spec: str) -> None:
    """The very kernels, checked and called as on a GPU: with one pass, and Adam's update."""
    code = f"""
        from thinwire import kernels
        kernels._DEVICES["cuda"] = "cpu"
        from test_bench_codec_gpu import MadeUp
        from thinwire.tools.bench.codec.cases import plan
        from thinwire.tools.bench.codec.measurement import measure
        from thinwire.tools.bench.harness import Progress
        with kernels.force("cuda"):
            (case,) = plan(["{spec}"], ["4197"], ["float32"])
            rows = list(measure(case, {{"{spec}"}}, MadeUp(), 50, Progress(9)))
        for row in rows:
            if row["kernel"] != "torch":
                print(row["name"], row["kernel"], row["graph"], sep="; ")
        """
    printed = run_python(
        code, time_limit=250, TRITON_INTERPRET="1", PYTHONPATH=f"{HERE}:{HERE.parents[1]}", PYTHONWARNINGS="ignore",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    kernel = "thinwire.kernels.cuda." + spec.split(":")[0]
    expected = [f"{part} {spec}; {kernel}; True" for part in PARTS]
    assert printed.splitlines() == expected + [f"{name}; thinwire.kernels.cuda.adam; True" for name in (WRITE, ADVANCE)]


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ("write", "advance: residual: 1 of 5000 differ from the update that was written, the first at 17"),
        ("advance", "momentum: off by up to 1"),
    ],
)
def test_no_wrong_update_is_timed(spoilt: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, m, v, residual = torch.randn(5000), torch.randn(5000), torch.rand(5000) + 0.1, torch.randn(5000)
    before = [tensor.clone() for tensor in (gradient, m, v, residual)]
    update = AdamUpdate(m, v, 0.5, 1.0, 1.0, 1e-8, 8.0, 1.0, 0.9)
    check_update(update, gradient, residual)
    assert all(map(torch.equal, (gradient, m, v, residual), before))
    usual = getattr(cpu_adam, spoilt)

    def wrong(given: AdamUpdate, gradient: Tensor, target: Tensor) -> None:
        usual(given, gradient, target)
        (target if spoilt == "write" else given.m)[17] += 1

    monkeypatch.setattr(cpu_adam, spoilt, wrong)
    with pytest.raises(Failure, match=message):
        check_update(update, gradient, residual)
