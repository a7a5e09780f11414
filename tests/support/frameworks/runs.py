"""The programs of this folder, started as their users start them."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from support.frameworks import plain
from support.training_runs import LIMIT, TORCHRUN, Job
from thinwire.testing import RankPool

FOLDER = Path(__file__).parent
TESTS = str(FOLDER.parents[1])
PROGRAMS: dict[str, tuple[str, ...]] = {
    "plain": (*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(FOLDER / "plain.py")),
    "lightning": (sys.executable, str(FOLDER / "with_lightning.py")),
    "accelerate": (
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
        "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
        str(FOLDER / "with_accelerate.py"),
    ),
    "transformers": (*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(FOLDER / "with_transformers.py")),
}  # fmt: skip
STEPS = 40


def require(package: str, extra: str = "") -> None:
    """Skip the test where a package is missing; CI needs it. `extra` names the one that has it, if not like itself."""
    if importlib.util.find_spec(package) is None:
        reason = f"{package} is not installed: pip install 'thinwire[{extra or package}]'"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)


class Trained(NamedTuple):
    """What a program has left."""

    folder: Path
    result: dict[str, Any]

    def weights(self, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(self.folder / f"{name}-{rank}.pt", weights_only=True)
        return loaded

    def assert_same(self, name: str, other: "Trained | None" = None, as_name: str | None = None) -> None:
        """Both ranks have the same weights, bit for bit, and those of another training."""
        expected = (other or self).weights(as_name or name)
        for rank in range(2):
            found = self.weights(name, rank)
            differ = [key for key in expected if not torch.equal(found[key], expected[key])]
            assert not differ, f"{name} of rank {rank}: {differ}"

    def assert_like_plain(self, plain: "Trained") -> None:
        """Training is that of a plain loop, bit for bit, also after a resume, and sends as many bytes."""
        self.assert_same("whole", plain)
        self.assert_same("whole-resumed", plain)  # the checkpoint has the residuals and the momentum of both ranks
        plain.assert_same("whole-resumed", as_name="whole")
        assert self.result["bytes"] == plain.result["bytes"]


def environment() -> dict[str, str]:
    """What the programs need to import this package."""
    paths = filter(None, [TESTS, os.environ.get("PYTHONPATH")])
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def trained_by(name: str, folder: Path, steps: int = STEPS, *more: str) -> Trained:
    """Run a program to its end."""
    if name != "plain":
        require(name)
    folder.mkdir()
    with Job(folder, str(folder), str(steps), *more, program=PROGRAMS[name], **environment()) as job:
        done = job.end(2 * LIMIT)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert "cannot be loaded by the others" not in done.err, "a warning where rank 0 saves its state alone"
    return Trained(folder, json.loads((folder / "result.json").read_text()))


def trained_plainly(ranks: RankPool, folder: Path, steps: int = STEPS) -> Trained:
    """The same by ranks of the pool."""
    folder.mkdir()
    ranks.run(plain.train, 2, folder, steps)
    return Trained(folder, json.loads((folder / "result.json").read_text()))
