"""The data in the recipe benchmark: ranks share one stream, models must fit, and a file is a text to train on."""

from pathlib import Path

import pytest

from thinwire.testing import RankPool
from thinwire.tools import cli, record
from thinwire.tools.bench.recipe import Options, check
from thinwire.tools.bench.recipe.gradients import Threads
from thinwire.tools.bench.recipe.trainer import Trainer
from thinwire.tools.train.data import Batch, Text


class Recorder(Text):
    """Remembers where its batches began."""

    def __init__(self) -> None:
        super().__init__(8)
        self.taken: list[tuple[int, int, int]] = []

    def batch(self, start: int, size: int, seed: int) -> Batch:
        self.taken.append((start, size, seed))
        return super().batch(start, size, seed)


class RecordingTrainer(Trainer):
    def taken(self) -> list[tuple[int, int, int]]:
        assert isinstance(self._data, Recorder)
        return self._data.taken

    def record(self) -> None:
        self._data = Recorder()


SMALL_GPT = "gpt:layers=1,width=16,heads=1,context=8"


def taken_by(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    given = Options(methods=("sgd dense",), steps=4, batch=3, seeds=(5,), model=SMALL_GPT)
    trainer = RecordingTrainer(rank, world_size, given)
    trainer.record()
    trainer.start(given.chosen[0], 5)
    trainer.advance(3)
    return trainer.taken()


def test_ranks_of_the_benchmark_share_the_stream(ranks: RankPool) -> None:
    first, second = ranks.run(taken_by, 2)
    assert first == [(0, 3, 5), (6, 3, 5), (12, 3, 5)]
    assert second == [(3, 3, 5), (9, 3, 5), (15, 3, 5)]


def test_of_ranks_that_are_threads_the_first_takes_the_batches_of_all() -> None:
    given = Options(methods=("sgd dense",), steps=4, batch=3, seeds=(5,), model=SMALL_GPT, simulate=True)
    with Threads() as threads:
        threads.form(2, RecordingTrainer, given)
        threads.ask("record")
        threads.ask("start", given.chosen[0], 5)
        threads.ask("advance", 3)
        first, second = threads.ask("taken")
    assert first == [(0, 6, 5), (6, 6, 5), (12, 6, 5)]
    assert second == []


def test_the_benchmark_refuses_models_for_other_images() -> None:
    for model in ("resnet18", "cnn:size=28", "cnn:channels=3"):
        with pytest.raises(ValueError, match="does not fit digits, which needs images of 1 x 8 x 8: use cnn:size=8"):
            check(Options(model=model))


def test_the_benchmark_trains_on_a_file(tmp_path: Path) -> None:
    path, rows = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    path.write_bytes(bytes(range(256)) * 100)
    options = ["--model", "gpt:layers=1,width=32,heads=2,context=16", "--batch", "4", "--steps", "30", "--simulate"]
    command = ["bench", "recipe", *options, "--methods", "adamw dense;lr=1e-2", "--data-dir", str(path)]
    assert cli.main([*command, "--out", str(rows)]) == 0
    (row,) = record.read(rows)
    assert row["loss"] < 4.5, "what comes next is easy to learn: below the 5.5 of a guess"
