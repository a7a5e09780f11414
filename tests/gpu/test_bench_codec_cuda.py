"""`python -m benchmarks codec --device cuda` for real, at a small size."""

import contextlib
import io
import tempfile
from pathlib import Path

from benchmarks.codec import on_gpu, run
from benchmarks.codec_rows import default_specs
from benchmarks.harness import read

PARTS = ("encode", "commit", "decode 1 x", "decode 8 x", "accumulate")


def measured(
    *specs: str, sizes: tuple[str, ...] = ("3000000",), dtypes: tuple[str, ...] = ()
) -> tuple[str, list[dict]]:
    """What is printed, and the rows that are written."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        path = Path(folder) / "rows.jsonl"
        assert run(on_gpu(specs=specs, sizes=sizes, dtypes=dtypes, repeats=8, out=path)) == 0
        return printed.getvalue(), list(read(path))


def test_the_whole_run() -> None:
    printed, rows = measured()
    first = default_specs("cuda")[0]
    for dtype in ("float32", "bfloat16"):
        mine = {row["name"]: row for row in rows if row["dtype"] == dtype}
        names = [f"compress {spec}" for spec in default_specs("cuda")] + [f"{part} {first}" for part in PARTS]
        names += ["copy", "residual.add_(grad)", "out.zero_()", "torch.topk, 1/64", "torch.topk, 1/8"]
        names += ["the same in float32"] if dtype != "float32" else []
        assert not set(names) - set(mine), set(names) - set(mine)
        for row in mine.values():
            assert 0 < row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"], row
            ours = row["kernel"] != "torch"
            assert not ours or row["kernel"].startswith("thinwire.kernels.cuda.") or "randomk" in row["name"], row
            assert row["graph"] == (not row["name"].startswith(("torch", "compress randomk"))), row
            assert row["name"] in printed
        assert mine[f"compress {first}"]["speedup"] > 1
        assert mine[f"compress {first}"]["torch_topk_ms"]["p50"] > 0
    under = rows[0]["conditions"]
    assert all(under[key] for key in ("device_name", "torch", "triton", "cuda", "date", "device_cache")), under
    assert under["kernels"] == "cuda"
    assert under["device_name"] in printed


def test_compressors_by_name_in_all_their_parts_and_any_dtype() -> None:
    specs = ("quantize:bits=4", "randomk:ratio=1/64", "none", "topk:ratio=1/16,bits=32,chunk=1024")
    _, rows = measured(*specs, dtypes=("float16", "float64"))
    for dtype in ("float16", "float64"):
        names = {row["name"] for row in rows if row["dtype"] == dtype}
        assert {f"{part} {spec}" for part in ("compress", *PARTS) for spec in specs} <= names
    compressed = [row for row in rows if row["dtype"] == "float64" and any(spec in row["name"] for spec in specs)]
    assert {row["kernel"].split(".")[-2] for row in compressed} == {"reference"}
