"""Local steps and Muon in the benchmarks: names, whole rounds, bytes of a round, and a loss that can be worked out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from support.loaded import run_command
from thinwire.tools import cli, record
from thinwire.tools.bench.link import rounds
from thinwire.tools.bench.link.settings import Options
from thinwire.tools.bench.methods import BY_LINK, BY_ROUND_TRIP, TOPK, parse
from thinwire.tools.bench.training import check, split_for_muon
from thinwire.tools.train.models import model_config

TINY = ["--model", "gpt:layers=1,width=64,heads=2,context=16", "--batch", "2", "--simulate"]
LARGE, SMALL = 256 * 64 + 12 * 64 * 64, 16 * 64 + 3 * 64
"""Elements of its large parameters, and of those that are sent in 8 bits."""


def test_names() -> None:
    given = check("muon local steps 8 quantize:bits=2;delay=4;lr=2e-3;ns_steps=3")
    assert (given.family, given.name, given.every, given.spec) == ("muon", "local steps", 8, "quantize:bits=2")
    assert given.options == {"delay": 4, "lr": 2e-3, "ns_steps": 3}
    assert parse("local steps 3").spec == TOPK
    assert parse("local steps 3").family == "adamw"
    assert [parse("dense").whole_rounds(5), parse("local steps 8").whole_rounds(9)] == [5, 16]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local steps", "method 'local steps' is unknown, expected one of"),
        ("local steps 0", "method 'local steps 0' is unknown"),
        ("local steps many", "method 'local steps many' is unknown"),
        ("muon thinwire", "method 'muon thinwire' is unknown"),
        ("muon thinwire.AdamW default", "method 'muon thinwire.AdamW default' is unknown"),
        ("local steps 8;every=4", "option 'every' of method 'local steps 8', expected one of"),
        ("local steps 8 zip", "compressor 'zip'"),
    ],
)
def test_unknown_names(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(text)


def test_a_round_trip_time_adds_local_steps_to_all() -> None:
    plain, delayed = ([one.text for one in Options(rates=(rate,)).chosen] for rate in ("1gbit", "1gbit,20ms"))
    assert plain == [text for text in BY_LINK if text in delayed]
    assert delayed == [*plain, *BY_ROUND_TRIP]


def test_muon_gets_hidden_matrices() -> None:
    gpt = model_config("gpt:layers=2,width=32,context=8").build(0)
    hidden, others = split_for_muon(gpt)
    assert sum(one.numel() for one in hidden) == 2 * 12 * 32 * 32
    assert {id(one) for one in (*hidden, *others)} == {id(one) for one in gpt.parameters()}
    with_head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert [one.shape for one in split_for_muon(with_head)[0]] == [torch.Size([8, 4])]
    with pytest.raises(ValueError, match="Conv2d has no hidden matrix, which Muon is for: use adamw"):
        split_for_muon(nn.Conv2d(3, 8, 3))


def train(path: Path, steps: int, *methods: str) -> dict[str, dict[str, Any]]:
    arguments = [*TINY, "--steps", str(steps), "--methods", *methods, "--out", str(path)]
    assert cli.main(["bench", "recipe", *arguments]) == 0
    return {line["method"]: line for line in record.read(path)}


def test_a_round_of_one_step_without_compression_is_dense_training(tmp_path: Path) -> None:
    """The mean of what SGD makes of each gradient is what it makes of their mean."""
    rows = train(tmp_path / "rows.jsonl", 5, "sgd dense", "sgd local steps 1 none", "sgd local steps 5 none")
    dense, each, last = (rows[name]["losses"] for name in rows)
    assert [step for step, _ in dense] == [step for step, _ in each] == [1, 2, 3, 4, 5]
    assert [loss for _, loss in each] == pytest.approx([loss for _, loss in dense], rel=1e-4)
    assert [step for step, _ in last] == [5]
    assert last[0][1] != pytest.approx(dense[-1][1], rel=1e-6), "ranks have gone apart for five steps"


def test_bytes_are_those_of_whole_rounds_and_ranks_end_alike(tmp_path: Path) -> None:
    names = ("adamw dense", "adamw local steps 4", "adamw local steps 8", "adamw local steps 4;fragments=2;delay=2")
    path, plot = tmp_path / "rows.jsonl", tmp_path / "loss.svg"
    rows = train(path, 16, *names, "muon dense", "muon local steps 4 quantize:bits=2")
    assert all(row["fault"] is None for row in rows.values())
    four, eight, parts, muon = (row for name, row in rows.items() if "local" in name)
    assert four["bytes_total"] == 2 * eight["bytes_total"]
    payload = thinwire.compressor(TOPK).nbytes(LARGE, torch.float32) + thinwire.Quantize(bits=8).nbytes(SMALL)
    assert four["bytes_total"] == pytest.approx(4 * payload, rel=0.02)
    assert four["sent"] == [four["bytes_total"] * step / 16 for step, _ in four["losses"]]
    assert [step for step, _ in eight["losses"]] == [8, 16]
    assert parts["bytes_total"] >= four["bytes_total"]
    assert muon["family"] == "muon"
    assert cli.main(["bench", "results", str(path), "--plot", str(plot)]) == 0
    drawn = plot.read_text()
    assert "H=4" in drawn
    assert "H=8" in drawn
    assert drawn.count("adamw local steps") == 2, "a line for each, whatever H is"


def test_link_rows_are_means_of_whole_rounds(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    options = ["--rates", "100mbit,20ms", "--relay", "--parameters", "4e5", "--batch", "4", "--steps", "4"]
    given = [*options, "--methods", "no communication", "local steps 4", "local steps 4;delay=2", "--out", str(path)]
    done = run_command("bench", "link", *given)
    assert done.returncode == 0, done.stderr
    assert "median of a step (local steps: mean over whole rounds)" in done.stdout
    assert "delivers each byte half of it after it was sent" in done.stdout
    nothing, plain, delayed = record.read(path)
    assert [row["statistic"] for row in (nothing, plain, delayed)] == ["median", "mean", "mean"]
    assert [row["steps"] for row in (plain, delayed)] == [4, 4]
    assert plain["ms"] == plain["ms_mean"] >= 20 / 2 / 4, "each round waits for a message"
    weights = 6 * 12 * 72 * 72
    payload = thinwire.compressor(TOPK).nbytes(weights, torch.float32)
    assert payload / 4 < plain["bytes_per_step"] < 1.5 * payload / 4 + 2000


def test_steps_are_rounded_to_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Ranks:
        def ask(self, name: str, *args: Any, limit: float) -> list[Any]:
            asked.append((name, args[0]))
            return [1.0] if name == "warm_up" else [[1.0] * args[0]] if name == "steps" else [None]

    class Net:
        def sent_bytes(self) -> list[int]:
            return [0]

    given = Options(rates=("1gbit",))
    taken, net, ranks = rounds.Taken(parse("local steps 8"), "1gbit", 2, 20), Net(), Ranks()
    while taken.left:
        rounds.take_steps(taken, given, net, ranks)  # type: ignore[arg-type]
    assert [count for name, count in asked if name == "warm_up"] == [16, 16, 16]
    assert [count for name, count in asked if name == "steps"] == [8, 8, 8]
    assert taken.row()["steps"] == 24
