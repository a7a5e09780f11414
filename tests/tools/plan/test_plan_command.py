"""`thinwire plan` as it is called and as docs/choosing.md shows it, its errors, and under torchrun, where it measures.

Ranks on two machines are in tests/tools/train/test_two_machines.py.
"""

import re
import shlex
from pathlib import Path

import pytest

from support.slow import slow
from support.training_runs import TORCHRUN, Done, run
from thinwire.tools import cli

GIVEN = {"--params": "7e9", "--world": "64", "--bandwidth": "1gbit", "--step-compute": "2s"}
PAGE = Path(__file__).parents[3] / "docs" / "choosing.md"
SHOWN = re.findall(r"^```console\n\$ thinwire (.*?)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
TOPK = "topk:ratio=1/64,bits=2"


def arguments(**changes: str | None) -> list[str]:
    """The command of the help, with changes; None leaves an option out."""
    given = {**GIVEN, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
    return ["plan", *(word for name, value in given.items() if value is not None for word in (name, value))]


def shown(capsys: pytest.CaptureFixture[str], *more: str, **changes: str | None) -> str:
    assert cli.main([*arguments(**changes), *more]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SHOWN) >= 4
    for command, lines in SHOWN:
        assert cli.main(shlex.split(command)) == 0
        printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        for line in lines.splitlines():
            assert " ".join(line.split()) in printed, "\n".join([command, *printed])


def test_sharded_model_sends_a_share_of_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    sent = {}
    for shard in ("1", "8"):
        text = shown(capsys, shard=shard)
        row = re.search(rf"thinwire.AdamW {TOPK} +sharded +\S+ \S+ +\S+x +\w+ +([\d.]+) (.B)", text)
        assert row, text
        sent[shard] = float(row[1]) * {"G": 1e9, "M": 1e6}[row[2][0]]
    assert sent["8"] == pytest.approx(sent["1"] / 8, rel=0.1)
    assert "875 M parameters of a rank in 135 bucket(s) of float32; 64 replicas of 8 ranks, each with a link " in text
    assert f'optimizer = thinwire.AdamW(model, lr=..., compressor="{TOPK}", group=mesh["replicate"])' in text


def test_latency_is_that_of_the_link_and_gradients_of_16_bits_take_half_the_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Milliseconds on a slow link, as Wi-Fi has, unless it is given."""
    cases = (({}, "54 Mbit/s, latency 2 ms"), ({"latency": "80us"}, "54 Mbit/s, latency 80 µs"))
    for changes, text in (*cases, ({"bandwidth": "1gbit/s"}, "1 Gbit/s, latency 50 µs")):
        assert f"a link of {text}\n" in shown(capsys, **{"params": "25M", "bandwidth": "54Mbps", **changes})
    for dtype, row in (("float32", r"5.5 GB .* does not fit"), ("bfloat16", r"2.8 GB +[\d,]+ +0 +0\n")):
        text = shown(capsys, params="700M", gradients=dtype, gpu_memory="10GB")
        assert re.search(rf"dense .* {row}", text), text
        assert f"bucket(s) of {dtype};" in text


def test_fewer_cores_are_slower(capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    for cores, origin in ((None, "an H200;"), ("32", "one core of an AMD EPYC, times 32;"), ("2", "one core of")):
        text = shown(capsys, params="100M", cores=cores)
        assert f"codec: as measured on {origin}" in text
        found = re.search(r"topk\S+ +sharded +([\d.]+) (m?s)", text)
        assert found, text
        steps.append(float(found[1]) * (1e-3 if found[2] == "ms" else 1))
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


MESSAGES: list[tuple[dict[str, str | None], str]] = [
    ({"params": None, "world": None}, "--params, --world not given: expected such as --params 7e9"),
    ({"step_compute": None}, "--step-compute not given: expected such as"),
    ({"params": "-7e9"}, "--params '-7e9', expected a whole number from 1"),
    ({"world": "1"}, "--world 1, expected 2 to 1,048,576 ranks: one has nobody to exchange with"),
    ({"world": "four"}, "--world"),
    ({"shard": "0"}, "--shard 0, expected 1 to 65,536"),
    ({"cores": "0"}, "--cores 0, expected 1 to 65,536"),
    ({"gradients": "float64"}, "float64"),
    ({"gpu_memory": "80"}, "--gpu-memory '80', expected bytes with their unit, such as 80GB"),
    ({"bandwidth": "0gbit"}, "--bandwidth: rate '0gbit', expected bits per second from 100kbit to 1000gbit"),
    ({"step_compute": "0s"}, "--step-compute '0s', expected a time above 0"),
    ({"latency": "-1us"}, "--latency '-1us', expected a time 0 or more"),
    ({"specs": "zip"}, "compressor 'zip' in 'zip' is unknown"),
    ({"specs": "randomk:ratio=1/64"}, "--specs randomk:ratio=1/64: expected topk or quantize"),
]
GONE = {
    "model": "give --params and --step-compute", "codec": "under torchrun it is measured", "plot": "vary --bandwidth",
    "tokens": "give --step-compute", "device": "give --step-compute", "check": "python -m benchmarks link",
}  # fmt: skip


def test_wrong_value_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for changes, message in MESSAGES:
        assert cli.main(arguments(**changes)) == 2, changes
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), changes
        assert message in err, changes


def test_option_of_earlier_versions_names_what_to_use_instead(capsys: pytest.CaptureFixture[str]) -> None:
    for name, instead in GONE.items():
        for words in ([f"--{name}", "x"], [f"--{name}=x"]):
            assert cli.main([*arguments(), *words]) == 2, name
            assert f"thinwire plan: error: --{name} is no longer an option: {instead}" in capsys.readouterr().err


# Under torchrun.

MEASURED = ("--params", "22.5k", "--step-compute", "100ms")


def plan(cwd: Path, *arguments: str, ranks: int = 2) -> Done:
    """What torchrun does, on a port that the system chooses."""
    place = ("--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    return run(cwd, *arguments, program=(*TORCHRUN, *place, "-m", "thinwire", "plan"), OMP_NUM_THREADS="1")


def test_links_and_codec_are_measured(tmp_path: Path) -> None:
    done = plan(tmp_path, *MEASURED)
    assert done.code == 0, done.err
    first, compute, codec, *_ = done.out.splitlines()
    link = r"each with a link of \S+ .bit/s, latency \S+ .?s"
    assert re.fullmatch(rf"22.5 k parameters in 1 bucket\(s\) of float32; 2 ranks, {link}", first)
    assert compute.startswith("a step without communication: 100 ms, ")
    assert codec.startswith("codec: as measured on 1 thread(s) per rank here; elements compressed per second: quantize")
    for row in ("dense +ring", "fp16 hook +ring", "attach quantize:bits=8 +gather", "thinwire.AdamW topk"):
        assert len(re.findall(rf"^ *{row}", done.out, re.MULTILINE)) == 1, "one rank prints"
    assert re.search(r"^(Use|Do not compress)", done.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        slow(("--params", "1M"), 2, "--step-compute not given: expected such as --params 7e9 --step-compute 2s"),
        slow(MEASURED, 1, "torchrun started one rank, which has nobody to exchange with"),
        ((*MEASURED, "--world", "64"), 2, "--world 64: under torchrun it is measured; leave it out"),
    ],
    ids=["missing", "one rank", "measured"],
)
def test_wrong_options_are_shown_once(arguments: tuple[str, ...], ranks: int, message: str, tmp_path: Path) -> None:
    done = plan(tmp_path, *arguments, ranks=ranks)
    assert done.code != 0
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith("thinwire plan: error: ")]
    assert len(lines) == 1, done.err
    assert message in lines[0]
