"""`thinwire plan` by numbers, as it is called; and one line for whatever makes no sense."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import run_python
from thinwire.tools import cli

COMMAND = str(Path(sys.executable).with_name("thinwire"))
GIVEN = {"--params": "7e9", "--world": "64", "--bandwidth": "1gbit", "--step-compute": "2s"}


def arguments(**changes: str | None) -> list[str]:
    """The command of the help, with changes; None leaves an option out."""
    given = {**GIVEN, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
    return ["plan", *(word for name, value in given.items() if value is not None for word in (name, value))]


@pytest.fixture(autouse=True)
def _not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_installed_command() -> None:
    hidden = ("RANK", "WORLD_SIZE", "COLUMNS")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([COMMAND, *arguments()], capture_output=True, text=True, timeout=120, check=False, env=clean)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "7 G parameters in 1,070 bucket(s) of float32; 64 ranks, each with a link of 1 Gbit/s, latency 50 µs\n"
        "a step without communication: 2 s, 1.33 s of it backward (as given)\n"
    ) in done.stdout
    for row in (
        r"dense +ring +\d+ s +1\.0x +bandwidth +55 GB",
        r"thinwire.AdamW topk:ratio=1/64,bits=2 +sharded .* 1\.1 GB",
    ):
        assert re.search(row, done.stdout), done.stdout
    assert re.search(r"^Use thinwire.AdamW topk:ratio=1/64,bits=2 \(sharded\): ", done.stdout, re.MULTILINE)


def test_a_sharded_model_sends_a_share_of_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    sent = {}
    for shard in ("1", "8"):
        assert cli.main(arguments(shard=shard)) == 0
        shown = capsys.readouterr().out
        row = re.search(r"thinwire.AdamW topk:ratio=1/64,bits=2 +sharded +\S+ \S+ +\S+x +\w+ +([\d.]+) (.B)", shown)
        assert row, shown
        sent[shard] = float(row[1]) * {"G": 1e9, "M": 1e6}[row[2][0]]
    assert sent["8"] == pytest.approx(sent["1"] / 8, rel=0.1)
    assert "875 M parameters of a rank in 135 bucket(s) of float32; 64 replicas of 8 ranks, each with a link " in shown
    assert (
        'optimizer = thinwire.AdamW(model, lr=..., compressor="topk:ratio=1/64,bits=2", group=mesh["replicate"])'
        in shown
    )
    assert re.search(r"fp16 hook .* DDP only\n", shown), "it is shown, and marked"
    assert "fp16_compress_hook" not in shown


def test_it_may_say_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(params="25M", world="8", bandwidth="400gbit", step_compute="300ms")) == 0
    assert "\nDo not compress: " in capsys.readouterr().out


def test_a_slow_link_has_milliseconds_of_latency(capsys: pytest.CaptureFixture[str]) -> None:
    """As Wi-Fi has, unless it is given."""
    for changes, shown in (({}, "2 ms"), ({"latency": "80us"}, "80 µs"), ({"bandwidth": "1Gbps"}, "50 µs")):
        assert cli.main(arguments(**{"params": "25M", "bandwidth": "54Mbps", **changes})) == 0
        assert f"latency {shown}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bandwidth", "shown"),
    [
        ("wifi", "8 ranks, sharing a half-duplex channel of 300 Mbit/s, latency 3 ms\n"),
        ("Wi-Fi", "8 ranks, sharing a half-duplex channel of 300 Mbit/s, latency 3 ms\n"),
        ("wan", "8 ranks, each with a link of 100 Mbit/s, latency 30 ms\n"),
        ("home", "8 ranks, each with a link of 20 Mbit/s, latency 20 ms\n"),
        ("1gbit/s", "8 ranks, each with a link of 1 Gbit/s, latency 50 µs\n"),
    ],
)
def test_links_by_name(bandwidth: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(params="25M", world="8", bandwidth=bandwidth)) == 0
    assert shown in capsys.readouterr().out


def test_a_latency_overrides_that_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(params="25M", world="8", bandwidth="wan", latency="150ms")) == 0
    assert "a link of 100 Mbit/s, latency 150 ms\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "peak"), [("h100", 989e12), ("RTX 4090", 165e12), ("300T", 300e12), ("100e12 FLOPS", 100e12)]
)
def test_a_step_that_is_estimated_says_so(device: str, peak: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Six operations for each parameter and token, at 40 % of the peak; of the whole model if it is sharded."""
    given = arguments(params="7B", step_compute=None, tokens="8192", device=device, shard="8")
    assert cli.main(given) == 0
    shown = capsys.readouterr().out
    found = re.search(r"^a step without communication: ([\d.]+) (m?s), .* \((.*)\)$", shown, re.MULTILINE)
    assert found, shown
    seconds = float(found[1]) * (1e-3 if found[2] == "ms" else 1)
    assert seconds == pytest.approx(6 * 7e9 * 8192 / (0.4 * peak), rel=0.01)
    assert found[3] == f"estimated: 6 x 7 G parameters x 8,192 tokens at 40% of {peak / 1e12:.3g} TFLOPS"


def test_a_model_is_measured_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a cluster, for ranks that are like this machine."""
    given = ["--model", "gpt:layers=1,width=32,context=8", "--world", "16", "--bandwidth", "1gbit"]
    assert cli.main(["plan", *given, "--specs", "quantize:bits=8"]) == 0
    first, compute, codec, *_ = capsys.readouterr().out.splitlines()
    assert re.match(r"\S+ k parameters in 1 bucket\(s\) of float32; 16 ranks, each with a link of 1 Gbit/s", first)
    assert compute.endswith("(measured here)")
    assert codec.startswith("codec: measured here, ")


def test_gradients_of_16_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """Dense sends half the bytes, so there is nothing for bf16 and fp16 to do; a model needs half the memory."""
    shown = {}
    for dtype in ("float32", "bfloat16"):
        assert cli.main(arguments(params="700M", gradients=dtype, gpu_memory="10GB")) == 0
        shown[dtype] = capsys.readouterr().out
    assert re.search(r"dense .* 5.5 GB .* does not fit", shown["float32"])
    assert re.search(r"dense .* 2.8 GB +[\d,]+ +0 +0\n", shown["bfloat16"]), shown["bfloat16"]
    assert "bf16" not in shown["bfloat16"]
    assert "fp16" not in shown["bfloat16"]
    assert "bucket(s) of bfloat16;" in shown["bfloat16"]


def test_what_does_not_fit_is_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(gpu_memory="120GB")) == 0
    shown = capsys.readouterr().out
    assert re.search(r"thinwire.AdamW topk.* does not fit", shown), shown
    assert "\nUse bf16: " in shown
    assert "bf16_compress_hook" in shown


def test_a_processor_that_is_shared_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for cores in (None, "32", "2"):
        assert cli.main(arguments(params="100M", cores=cores)) == 0
        shown[cores] = capsys.readouterr().out
    assert "codec: as measured on an H200" in shown[None]
    assert "codec: as measured on one core of an AMD EPYC, times 32" in shown["32"]
    steps = {}
    for cores, text in shown.items():
        found = re.search(r"topk\S+ +sharded +([\d.]+) (m?s)", text)
        assert found, text
        steps[cores] = float(found[1]) * (1e-3 if found[2] == "ms" else 1)
    assert steps[None] < steps["32"] < steps["2"]


def test_a_codec_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments(params="100M", codec="1e9"), "--specs", "randomk:ratio=1/64"]) == 0
    shown = capsys.readouterr().out
    assert "codec: 1 G elements of randomk:ratio=1/64 per second, as given" in shown
    assert re.search(r"randomk:ratio=1/64 +values", shown)


def test_a_codec_that_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments(params="100M", cores="1", codec="here"), "--specs", "quantize:bits=8"]) == 0
    assert "codec: measured here, 1 thread(s)" in capsys.readouterr().out


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys\nfrom thinwire.tools.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('loaded:', [name for name in ('torch', 'numba', 'numpy') if name in sys.modules])\n"
    )
    for words in (["plan", "--help"], ["plan", "--frobnicate"], ["plan"], arguments(world="1"), arguments(params="x")):
        assert run_python(script, *words).endswith("loaded: []"), words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": None}, "--params not given: expected such as --params 7e9"),
        ({"params": None, "world": None}, "--params, --world not given"),
        ({"params": "-7e9"}, "--params '-7e9', expected a whole number from 1"),
        ({"params": "0"}, "--params '0', expected a whole number"),
        ({"params": "lots"}, "--params 'lots', expected a whole number"),
        ({"params": ""}, "--params '', expected a whole number"),
        ({"world": "1"}, "--world 1, expected 2 to 1,048,576 ranks: one has nobody to exchange with"),
        ({"world": "-4"}, "--world -4, expected 2"),
        ({"world": "four"}, "--world"),
        ({"cores": "0"}, "--cores 0, expected 1 to 65,536"),
        ({"step_compute": None}, "--step-compute (or --tokens and --device) not given: expected"),
        ({"step_compute": None, "tokens": "8192"}, "--step-compute (or --tokens and --device) not given"),
        ({"step_compute": None, "tokens": "no", "device": "h100"}, "--tokens 'no', expected a whole number"),
        ({"step_compute": None, "tokens": "1k", "device": "abacus"}, "--device 'abacus', expected one of b200, h200"),
        ({"tokens": "8192"}, "--tokens 8192: --step-compute is given; leave one out"),
        ({"gradients": "float64"}, "float64"),
        ({"gpu_memory": "80"}, "--gpu-memory '80', expected bytes with their unit, such as 80GB"),
        ({"bandwidth": "0gbit"}, "--bandwidth: rate '0gbit', expected bits per second from 100kbit to 1000gbit"),
        ({"bandwidth": "lan"}, "--bandwidth: rate 'lan', expected bits per second"),
        ({"bandwidth": "lan"}, "or one of wifi, wan, home"),
        ({"bandwidth": "-1gbit"}, "--bandwidth: rate '-1gbit', expected"),
        ({"bandwidth": "1 parsec"}, "--bandwidth: rate '1 parsec', expected"),
        ({"bandwidth": "nan"}, "--bandwidth: rate 'nan', expected"),
        ({"step_compute": "2"}, "--step-compute '2', expected a time above 0 with its unit, such as 2s"),
        ({"step_compute": "0s"}, "--step-compute '0s', expected a time above 0"),
        ({"step_compute": "2 weeks"}, "--step-compute '2 weeks', expected a time"),
        ({"latency": "-1us"}, "--latency '-1us', expected a time 0 or more"),
        ({"codec": "fast"}, "--codec 'fast', expected a whole number"),
        ({"codec": "here"}, "the ranks have no cores: give --cores 16"),
        ({"specs": "zip"}, "compressor 'zip' in 'zip' is unknown"),
        ({"specs": "none"}, "--specs none, which is compared anyway, as dense"),
        ({"specs": "randomk:ratio=1/64"}, "there is no figure for randomk as measured on an H200"),
        ({"model": "gpt"}, "--params 7e9: with --model it is measured on this machine; leave it out"),
        (
            {"model": "gpt", "params": None, "step_compute": None, "bandwidth": None},
            "--bandwidth not given: expected such as --model gpt --world 16 --bandwidth 1Gbps",
        ),
        ({"plot": "plan.gif"}, "--plot plan.gif, expected a file that ends in .svg"),
        ({"plot": "/nonexistent/plan.svg"}, "--plot /nonexistent/plan.svg, expected a file in an existing folder"),
    ],
    ids=str,
)
def test_nonsense_is_one_line(changes: dict[str, str | None], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(**changes)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("thinwire plan: error: ")
    assert message in shown.err
