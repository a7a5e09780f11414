"""Damaged files of a run: checkpoints, configs and metrics of any content are used or refused, and always in words."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from soak.campaign import Tried, ranks
from soak.trainings import RUN, STEPS, temporary, whole
from support.training_runs import assert_same_weights, newest, sign, train
from thinwire.tools import report
from thinwire.tools.train.checks import check
from thinwire.tools.train.config import defaults, load_config

DEEP = json.loads("[" * 200 + "]" * 200)
ODD = (None, True, -1, 0, 1.5, 10**9, 10**30, -(10**30), 1e308, float("nan"), "words", "", "\u2028", [], {}, [[]], DEEP)
"""Values of other types and sizes than those of a file."""
Damage = Callable[[Random, Path], None]


def change_value(draw: Random, value: Any) -> Any:
    """Return a copy in which one part, somewhere, is another value or is missing."""
    if not (isinstance(value, dict | list) and value and draw.random() < 0.9):
        return draw.choice(ODD)
    made = copy.copy(value)
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    if draw.random() < 0.1:
        del made[key]
    else:
        made[key] = change_value(draw, value[key])
    return made


def change_json(draw: Random, path: Path) -> None:
    """Change a value in a JSON file, or in some of its lines."""
    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    for at in draw.sample(range(len(texts)), min(3, len(texts))):
        texts[at] = json.dumps(change_value(draw, json.loads(texts[at])))
    path.write_text("\n".join(texts) + "\n")


def change_bytes(draw: Random, path: Path) -> None:
    """Overwrite some bytes, cut the file, or put something else in its place."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 5)):
        content[draw.randrange(len(content))] = draw.getrandbits(8)
    noise = draw.choice([b"", b"[" * 100_000, b"9" * 10_000, draw.randbytes(1000)])
    path.write_bytes(draw.choice([bytes(content), bytes(content[: draw.randrange(len(content))]), noise]))


def change_state(draw: Random, path: Path) -> None:
    """Change what torch.save has written, and its SHA-256 in the manifest with it."""
    torch.save(change_value(draw, torch.load(path, weights_only=True)), path)
    sign(path)


RUNS = (("adamw", "default"), ("sgd", "default"), ("adamw", "none"), ("sgd", "quantize:bits=8"))
"""The optimizer and the compressor of the runs whose files are damaged."""


def resume(folder: Path, undamaged: Path, damage: Damage) -> str:
    ended = train(ranks(), 2, defaults(["--resume", "auto", "--out", str(folder)]), folder.parent)
    refused = [line for line in ended.err.splitlines() if "is damaged and not used" in line]
    assert ended.finished, ended
    assert len(refused) <= 1, ended.err
    assert all(len(line) < 2000 for line in refused), "a line without end"
    assert "Traceback" not in ended.err, ended.err
    if refused or damage is not change_state:  # a state that was signed anew may be another one
        assert_same_weights(folder, undamaged)
    return "not used" if refused else "used"


def read(name: str, folder: Path) -> str:
    """Read the config or make the report."""
    try:
        check(load_config(folder)) if name == "config.json" else report.write([folder], folder / "report.html")
        return "used"
    except ValueError as error:
        return "refused" if "\n" not in str(error) else f"refused in lines: {error}"


CASES: list[tuple[str, Damage]] = [
    ("manifest.json", change_json), ("manifest.json", change_bytes), ("model.pt", change_state),
    ("rank1.pt", change_state), ("rank0.pt", change_bytes), ("config.json", change_json),
    ("config.json", change_bytes), ("metrics.jsonl", change_json), ("metrics.jsonl", change_bytes),
]  # fmt: skip


def files(draw: Random) -> Tried:
    """A file of a run is damaged: it is used, not used, or refused in one line."""
    name, damage = draw.choice(CASES)
    undamaged = whole(2, *draw.choice(RUNS))
    of_run, ends = name in ("config.json", "metrics.jsonl"), []
    for _ in range(50 if of_run else 1):
        with temporary() as cwd:
            folder = Path(shutil.copytree(undamaged, Path(cwd) / RUN))
            if not of_run:
                shutil.rmtree(newest(folder))  # that of the last step
            damage(draw, (folder if of_run else newest(folder)) / name)
            ends.append(read(name, folder) if of_run else resume(folder, undamaged, damage))
    assert {*ends} <= {"used", "not used", "refused"}, ends
    found = ", ".join(f"{ends.count(end)} {end}" for end in sorted({*ends}))
    counts = {"damaged files": len(ends)} | ({} if of_run else {"steps": STEPS})
    return Tried(f"{name} by {damage.__name__}: {found}", counts)
