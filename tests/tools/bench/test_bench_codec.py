"""`thinwire bench codec`: every compressor is measured, and nothing wrong is reported."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from support.slow import slow
from thinwire import kernels
from thinwire.compressors import NoCompression, spec
from thinwire.kernels.layout import Layout, QuantizeLayout, TopKLayout
from thinwire.kernels.reference import quantize as reference_quantize
from thinwire.kernels.reference import topk as reference_topk
from thinwire.tools import cli
from thinwire.tools.bench.codec.cases import DEFAULT_SPECS, default_specs, plan
from thinwire.tools.bench.codec.check import check
from thinwire.tools.bench.codec.measurement import ADD, ADVANCE, WRITE, select, select_per_chunk
from thinwire.tools.bench.measure import BURST, interleave, peak_memory

COMMAND = str(Path(sys.executable).with_name("thinwire"))
CPU = torch.device("cpu")
PARTS = ("compress", "encode", "commit", "decode 1 x", "decode 8 x", "accumulate")


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "dtypes"),
    [
        slow("reference", ["float32", "bfloat16", "float16", "float64"]),
        slow("default", ["float32", "bfloat16"]),
        ("default", ["float32"]),  # others would be compiled for this test alone
    ],
)
def test_the_installed_command_reports_every_compressor(backend: str, dtypes: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    options = ["--sizes", "10000", "--repeats", "2", "--out", str(path)]
    environment = {key: value for key, value in os.environ.items() if key != kernels.ENVIRONMENT_VARIABLE}
    environment["OMP_NUM_THREADS"] = "1"
    if backend == "reference":
        environment[kernels.ENVIRONMENT_VARIABLE] = backend
    result = subprocess.run(
        [COMMAND, "bench", "codec", *options, *(["--dtypes", *dtypes] if backend == "default" else [])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    conditions, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert conditions["kind"] == "conditions"
    assert conditions["kernels"] == backend
    assert conditions["threads"] == 1
    assert {line["kind"] for line in lines} == {"codec"}
    ours = [line for line in lines if "spec" in line]
    assert {(line["name"], line["dtype"]) for line in ours} == {
        (f"{part} {spec}", dtype) for part in PARTS for spec in default_specs() for dtype in dtypes
    }
    others = {(line["name"], line["dtype"]) for line in lines if "spec" not in line}
    names = [
        ADD,
        "copy",
        "out.zero_()",
        "torch: add topk gather clear per chunk, 1/64",
        WRITE,
        ADVANCE,
    ]
    assert {(name, dtype) for name in names for dtype in dtypes} < others
    expected = "reference" if backend == "reference" else kernels.backends()[0]
    for line in ours:
        compressor = thinwire.compressor(line["spec"])
        assert line["kernel"].split(".")[2] == ("reference" if compressor.name in ("none", "randomk") else expected)
        assert line["payload_bytes"] == compressor.nbytes(10_000, getattr(torch, line["dtype"]))
        assert line["ms"]["samples"] == 2
        assert 0 < line["ms"]["p20"] <= line["ms"]["p50"] <= line["ms"]["p80"]
        selects = line["name"].startswith("compress") and compressor.name not in ("none", "quantize")
        assert (line["torch_ms"] is not None) == selects
        assert line["times_add"] == pytest.approx(line["ms"]["p50"] / line["add_ms"]["p50"])

    assert "10,000 x float32 (0.04 MB)" in result.stdout
    assert all(label in result.stdout for label in default_specs())
    assert result.stderr.count("\n") == len(dtypes) * (len(default_specs()) + 2)  # plain lines
    assert "\x1b" not in result.stdout + result.stderr


def run_here(*arguments: str) -> int:
    return cli.main(["bench", "codec", "--sizes", "10000", "--dtypes", "float32", "--repeats", "1", *arguments])


class Broken:
    """The reference kernels, with one function spoilt."""

    def __init__(self, base: Any) -> None:
        self._base = base

    def encode(self, tensor: Tensor, residual: Tensor | None, layout: Layout, payload: Tensor) -> bool:
        return bool(self._base.encode(tensor, residual, layout, payload))

    def commit(self, tensor: Tensor, residual: Tensor, layout: Layout, payload: Tensor) -> None:
        self._base.commit(tensor, residual, layout, payload)

    def decode(self, payloads: Tensor, layout: Layout, out: Tensor, weight: float, add: bool) -> None:
        self._base.decode(payloads, layout, out, weight, add)


class DropsAnEntry(Broken):
    def encode(self, tensor: Tensor, residual: Tensor | None, layout: Layout, payload: Tensor) -> bool:
        finite = super().encode(tensor, residual, layout, payload)
        assert isinstance(layout, TopKLayout)
        first_value = slice(layout.record.codes_at, layout.record.codes_at + 4)
        payload[first_value] = 0
        return finite


class ChoosesOtherPositions(Broken):
    def encode(self, tensor: Tensor, residual: Tensor | None, layout: Layout, payload: Tensor) -> bool:
        other = tensor.clone()
        other[other.add(residual).abs().argmax()] = 0
        return super().encode(other, residual, layout, payload)


class CutsTheScale(Broken):
    def encode(self, tensor: Tensor, residual: Tensor | None, layout: Layout, payload: Tensor) -> bool:
        finite = super().encode(tensor, residual, layout, payload)
        payload[0] -= 4  # units in the last place of the first block's scale
        return finite


class ForgetsTheTensor(Broken):
    def commit(self, tensor: Tensor, residual: Tensor, layout: Layout, payload: Tensor) -> None:
        super().commit(tensor, residual, layout, payload)
        residual[5] += 1e-3


class DecodesOneEntryWrong(Broken):
    def decode(self, payloads: Tensor, layout: Layout, out: Tensor, weight: float, add: bool) -> None:
        super().decode(payloads, layout, out, weight, add)
        if not add:
            out[17] += 1e-3


class DecodesManyWrong(Broken):
    def decode(self, payloads: Tensor, layout: Layout, out: Tensor, weight: float, add: bool) -> None:
        super().decode(payloads, layout, out, weight, add)
        if len(payloads) > 1:
            out[17] += 1e-3


class IgnoresTheWeight(Broken):
    def decode(self, payloads: Tensor, layout: Layout, out: Tensor, weight: float, add: bool) -> None:
        super().decode(payloads, layout, out, 1.0 if add and weight > 0 else weight, add)


class CallsItNotFinite(Broken):
    def encode(self, tensor: Tensor, residual: Tensor | None, layout: Layout, payload: Tensor) -> bool:
        return super().encode(torch.full_like(tensor, torch.nan), residual, layout, payload)


@pytest.mark.parametrize(
    ("broken", "label", "message"),
    [
        (DropsAnEntry, "topk:ratio=1%,bits=32", "encode: payload"),
        (ChoosesOtherPositions, "topk:ratio=1/64,bits=2", "encode: payload"),
        (ChoosesOtherPositions, "topk:ratio=1/64,bits=2,chunk=none", "encode: payload"),
        (CutsTheScale, "quantize:bits=8", "encode: payload"),
        (ForgetsTheTensor, "topk:ratio=1%,bits=32", "commit: residual"),
        (ForgetsTheTensor, "quantize:bits=4", "commit: residual"),
        (DecodesOneEntryWrong, "quantize:bits=2", "decode of 1: result"),
        (DecodesManyWrong, "quantize:bits=2", "decode of 8: result"),
        (IgnoresTheWeight, "topk:ratio=1/64,bits=2", "accumulate: result"),
        (CallsItNotFinite, "quantize:bits=8", "encode calls its input not finite"),
    ],
)
def test_a_broken_kernel_is_named_and_not_reported(
    broken: type[Broken],
    label: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(kernels.ENVIRONMENT_VARIABLE, raising=False)
    layout, base = (TopKLayout, reference_topk) if label.startswith("topk") else (QuantizeLayout, reference_quantize)
    modules: dict[str, Any] = vars(kernels)["_MODULES"]
    monkeypatch.setitem(modules["cpu"], layout, modules["cpu"][layout])  # puts it back afterwards
    kernels.register_kernel("cpu", layout, broken(base))

    path = tmp_path / "rows.jsonl"
    assert run_here("--specs", "none", label, "--out", str(path)) == 1
    output = capsys.readouterr()
    failed = [line for line in output.err.splitlines() if "FAILED" in line]
    assert len(failed) == 1
    assert f"10,000 x float32, {label}: " in failed[0]
    assert message in failed[0]
    labels = [json.loads(line).get("spec") for line in path.read_text().splitlines()]
    assert "none" in labels
    assert label not in labels


def test_an_error_inside_a_row_is_not_taken_for_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises(Broken):
        def encode(self, *arguments: Any) -> bool:
            raise ValueError("inside")

    monkeypatch.delenv(kernels.ENVIRONMENT_VARIABLE, raising=False)
    modules: dict[str, Any] = vars(kernels)["_MODULES"]
    monkeypatch.setitem(modules["cpu"], TopKLayout, Raises(reference_topk))
    with pytest.raises(RuntimeError, match="10,000 x float32, topk:ratio=1%: inside"):
        run_here("--specs", "topk:ratio=1%")


# Cases --------------------------------------------------------------------------------------------------------------


def test_every_registered_compressor_is_in_the_default_run() -> None:
    assert {thinwire.compressor(each).name for each in default_specs()} == set(thinwire.registered())
    assert set(DEFAULT_SPECS) <= set(thinwire.registered())


def test_a_new_compressor_gets_its_rows_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_plan_puts_other_dtypes_on_the_smallest_size_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "reference")
    cases = plan(["none"], ["2000", "1000"])
    assert [(case.numel, case.dtype) for case in cases] == [
        (1000, torch.float32),
        (2000, torch.float32),
        (1000, torch.bfloat16),
        (1000, torch.float16),
        (1000, torch.float64),
    ]
    cases = plan(["none"], ["1000", "2000"], ["float16"])
    assert [(case.numel, case.dtype) for case in cases] == [(1000, torch.float16), (2000, torch.float16)]


# Measuring ----------------------------------------------------------------------------------------------------------


def test_jobs_take_turns() -> None:
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, BURST + 1)
    assert "".join(calls) == "ab" + "a" * BURST + "b" * BURST + "ab"
    assert times["a"]["samples"] == times["b"]["samples"] == BURST + 1
    assert times["a"]["p20"] <= times["a"]["p50"] <= times["a"]["p80"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a process's peak")
def test_peak_memory_sees_what_a_job_frees_again() -> None:
    numel = 1 << 22
    tensor = torch.ones(numel)
    peak, nothing = peak_memory(lambda: tensor.abs().sum(), CPU), peak_memory(lambda: tensor.abs_(), CPU)
    assert peak is not None
    assert nothing is not None
    assert 0.9 * 4 * numel < peak < 1.2 * 4 * numel
    assert nothing < 0.1 * 4 * numel


def test_baselines_select_and_clear() -> None:
    generator = torch.Generator().manual_seed(1)
    gradient, residual = torch.randn(10_000, generator=generator), torch.randn(10_000, generator=generator)
    came_in = gradient + residual
    whole, chunked = residual.clone(), residual.clone()
    places, values = select(gradient, whole, 100)
    assert torch.equal(values, came_in[places].half())
    assert not whole[places].any()
    assert bool((came_in[places].abs().min() >= whole.abs().max()).item())
    (full, _), (rest, _) = select_per_chunk(gradient, chunked, 1 / 64)
    assert full.shape == (2, 64)
    assert rest.shape == (1, 29)
    assert int((chunked == 0).sum()) == 2 * 64 + 29


@pytest.mark.parametrize("label", [label for labels in DEFAULT_SPECS.values() for label in labels])
def test_check_accepts_what_is_right_and_leaves_the_residual(label: str) -> None:
    gradient, residual = torch.randn(10_000), torch.randn(10_000)
    before = residual.clone()
    check(thinwire.compressor(label).layout(10_000, torch.float32), gradient, residual)
    assert torch.equal(residual, before)
