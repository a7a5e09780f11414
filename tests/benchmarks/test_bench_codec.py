"""`python -m benchmarks codec`: every compressor is measured, and nothing wrong is reported."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thinwire
from benchmarks.__main__ import main
from benchmarks.clock import BURST, Call, Timing, interleave, peak_memory
from benchmarks.codec import show
from benchmarks.codec_rows import ADD, default_specs, measure, plan
from benchmarks.harness import Progress
from support.processes import run_python
from thinwire import kernels
from thinwire.compressors import NoCompression, spec
from thinwire.kernels.layout import QuantizeLayout, TopKLayout
from thinwire.kernels.reference import quantize as reference_quantize
from thinwire.kernels.reference import topk as reference_topk

PARTS = ("compress", "encode", "commit", "decode 1 x", "decode 8 x", "accumulate")
TOPK = "topk:ratio=1/64,bits=2"


def timing(milliseconds: float) -> Timing:
    return {"p20": 0.9 * milliseconds, "p50": milliseconds, "p80": 1.1 * milliseconds, "samples": 50}


class MadeUp:
    """A clock that makes each call once, and says that it took a millisecond."""

    def time(self, calls: Mapping[str, tuple[Call, bool]], samples: int, sets: int) -> dict[str, Timing]:
        for call, _ in calls.values():
            call(sets - 1)
        return {name: timing(1.0) for name in calls}

    def peak(self, call: Call) -> int:
        call(0)
        return 100


def run_here(*arguments: str) -> int:
    return main(["codec", "--sizes", "10000", "--dtypes", "float32", "--repeats", "2", *arguments])


def test_the_command_reports_every_compressor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(kernels.ENVIRONMENT_VARIABLE, raising=False)
    path = tmp_path / "rows.jsonl"
    assert run_here("--out", str(path)) == 0
    conditions, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (conditions["kind"], conditions["kernels"], conditions["repeats"]) == ("conditions", "default", 2)
    assert {line["kind"] for line in lines} == {"codec"}
    ours = [line for line in lines if "spec" in line]
    assert {line["name"] for line in ours} == {f"{part} {spec}" for part in PARTS for spec in default_specs()}
    assert {ADD, "copy", "out.zero_()"} < {line["name"] for line in lines if "spec" not in line}
    for line in ours:
        compressor = thinwire.compressor(line["spec"])
        kernel = "reference" if compressor.name in ("none", "randomk") else kernels.backends()[0]
        assert line["kernel"].split(".")[2] == kernel
        assert line["payload_bytes"] == compressor.nbytes(10_000, torch.float32)
        assert line["ms"]["samples"] == 2
        assert 0 < line["ms"]["p20"] <= line["ms"]["p50"] <= line["ms"]["p80"]
    printed = capsys.readouterr()
    assert "10,000 x float32 (0.04 MB)" in printed.out
    assert all(label in printed.out for label in default_specs())
    assert printed.err.count("\n") == len(default_specs()) + 1  # plain lines


def test_without_the_packages_of_the_command_line_and_without_a_gpu() -> None:
    code = """
        import sys
        for name in ("tyro", "rich"):
            sys.modules[name] = None
        from benchmarks.codec import on_gpu, run
        import benchmarks.gpu_step, torch
        torch.cuda.is_available = lambda: False
        try:
            run(on_gpu())
        except ValueError as error:
            print(error)
        """
    assert run_python(code) == "--device cuda, but torch finds no CUDA device"


def spoilt(base: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> Any:
    """The reference kernels, of which one function, for some of its arguments, writes a wrong bit."""
    written = {"encode": 3, "commit": 1, "decode": 2}

    def call(*given: Any) -> Any:
        result = getattr(base, name)(*given)
        given[written[name]].view(torch.uint8)[3] ^= when(*given) << 6
        return result

    return SimpleNamespace(**{each: getattr(base, each) for each in written} | {name: call})


def test_a_broken_kernel_is_named_and_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(kernels.ENVIRONMENT_VARIABLE, raising=False)
    modules: dict[str, Any] = vars(kernels)["_MODULES"]
    path = tmp_path / "rows.jsonl"
    for label, message, *wrong in (
        ("topk:ratio=1%,bits=32", "encode: payload", "encode"),
        ("quantize:bits=4", "commit: residual", "commit"),
        ("quantize:bits=2", "decode of 8: result", "decode", lambda payloads, *_: len(payloads) > 1),
        (TOPK, "accumulate: result", "decode", lambda *given: given[-1]),
    ):
        layout, base = (TopKLayout, reference_topk) if "topk" in label else (QuantizeLayout, reference_quantize)
        with monkeypatch.context() as patch:
            patch.setitem(modules["cpu"], layout, spoilt(base, *wrong))
            assert run_here("--specs", "none", label, "--out", str(path)) == 1, label
        failed = [line for line in capsys.readouterr().err.splitlines() if "FAILED" in line]
        assert [f"10,000 x float32, {label}: {message}" in line for line in failed] == [True], label
        labels = [json.loads(line).get("spec") for line in path.read_text().splitlines()]
        assert ("none" in labels, label in labels) == (True, False), label
    monkeypatch.setattr(reference_topk, "encode", lambda *_: int("inside"))
    monkeypatch.setitem(modules["cpu"], TopKLayout, reference_topk)
    with pytest.raises(RuntimeError, match=r"10,000 x float32, topk:ratio=1%: .*inside"):  # not wrong usage
        run_here("--specs", "topk:ratio=1%")


def test_a_new_compressor_gets_its_rows_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda"):
        assert {thinwire.compressor(each).name for each in default_specs(device)} == set(thinwire.registered())
    assert default_specs("cuda")[0] == TOPK
    monkeypatch.setattr(spec, "REGISTRY", dict(spec.REGISTRY))

    @thinwire.register_compressor("plain")
    @dataclass(frozen=True)
    class Plain(NoCompression):
        pass

    @thinwire.register_compressor("share")
    @dataclass(frozen=True)
    class Share(NoCompression):
        ratio: spec.Ratio = 1.0

    assert {"plain", "share:ratio=1/64"} < set(default_specs())
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "reference")
    assert run_here("--specs", "plain", "share:ratio=1/64") == 0


def test_plan_puts_other_dtypes_on_the_smallest_size_by_default() -> None:
    found = [(case.numel, case.dtype) for case in plan(["none"], ["2000", "1000"])]
    others = [(1000, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)]
    assert found == [(1000, torch.float32), (2000, torch.float32), *others]
    found = [(case.numel, case.dtype) for case in plan(["none"], ["1000", "2000"], ["float16"])]
    assert found == [(1000, torch.float16), (2000, torch.float16)]


def test_rows_of_a_size_and_their_table(capsys: pytest.CaptureFixture[str]) -> None:
    """With the reference kernels: which rows there are, in which order, with which bytes."""
    with kernels.force("reference"):
        (case,) = plan([TOPK, "quantize:bits=8", "randomk:ratio=1/64"], ["64k"], ["bfloat16"])
        rows = list(measure(case, {TOPK}, MadeUp(), 50, Progress(9)))  # type: ignore[arg-type]
    assert [row["name"] for row in rows] == [
        ADD, "the same in float32", "out.zero_()", "copy", "torch.topk, 1/64",
        "torch: add topk gather fp16 clear, 1/64",
        *(f"{part} {TOPK}" for part in PARTS), "compress quantize:bits=8", "compress randomk:ratio=1/64",
    ]  # fmt: skip
    by_name = {row["name"]: row for row in rows}
    compress = by_name[f"compress {TOPK}"]
    assert compress["kernel"] == "thinwire.kernels.reference.topk"
    assert compress["payload_bytes"] == case.compressors[TOPK].nbytes(64_000, case.dtype)
    assert compress["moved_bytes"] == pytest.approx(10 + compress["payload_bytes"] / 64_000)
    assert compress["of_floor"] == pytest.approx(compress["moved_bytes"] / 12)  # at the speed of float32
    assert compress["of_add"] == pytest.approx(compress["moved_bytes"] / 10)
    assert compress["torch_topk_ms"] == compress["torch_ms"] == timing(1.0)
    assert compress["gb_per_s"] == pytest.approx(compress["moved_bytes"] * 64_000 / 1e-3 / 1e9)
    assert compress["working_bytes"] == 100
    assert not compress["graph"]  # the reference waits for the device
    assert by_name["compress quantize:bits=8"]["torch_ms"] is None
    assert by_name[f"decode 8 x {TOPK}"]["of_floor"] == 1.0
    assert all(row["speedup"] is None for row in rows if not row["name"].startswith("compress"))
    capsys.readouterr()
    json.dumps(rows, allow_nan=False)
    under = {"device": "cuda", "device_name": "H200", "device_cache": 50 << 20, "cuda": "13", "triton": "3.6"}
    show([{**row, "device": "cuda"} for row in rows], under)
    first, _, title, heading, *rest = capsys.readouterr().out.splitlines()
    assert first == "H200, CUDA 13, Triton 3.6"
    assert title == "64,000 x bfloat16 (0.128 MB)"
    assert heading.split()[:4] == ["call", "p20", "p50", "ms"]
    shown = next(line for line in rest if line.startswith("compress"))
    assert shown.split()[:3] == ["compress", TOPK, "*"]  # the reference cannot be captured
    assert any("stay in the device's cache" in line for line in rest)


def test_jobs_take_turns() -> None:
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, BURST + 1)
    assert "".join(calls) == "ab" + "a" * BURST + "b" * BURST + "ab"
    assert times["a"]["samples"] == times["b"]["samples"] == BURST + 1
    assert times["a"]["p20"] <= times["a"]["p50"] <= times["a"]["p80"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a process's peak")
def test_peak_memory_sees_what_a_job_frees_again() -> None:
    numel, cpu = 1 << 22, torch.device("cpu")
    tensor = torch.ones(numel)
    peak, nothing = peak_memory(lambda: tensor.abs().sum(), cpu), peak_memory(lambda: tensor.abs_(), cpu)
    assert peak is not None
    assert nothing is not None
    assert 0.9 * 4 * numel < peak < 1.2 * 4 * numel
    assert nothing < 0.1 * 4 * numel
