"""Bytes as they were: payloads, frames, weights after a few steps, and the files of a checkpoint.

same_bytes.json has their SHA-256. If it fails, what thinwire computes has changed: old checkpoints and ranks of another
version do not fit any more. If that is wanted, `python tests/contract/test_same_bytes.py` writes the file anew.

Inputs are small whole numbers, and rates powers of two: sums are exact in any order, so any CPU has the same bits.
(Longer warm-ups are left out: there torch's own AdamW rounds by what the CPU can do.)
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

import pytest
import torch
from torch import Tensor

import thinwire
from support.cases import ALL_SPECS, KEY
from support.oracle import bytes_of
from support.training import Given
from support.training_runs import SMALL, changed, train
from thinwire import Collective, kernels
from thinwire.collectives import LocalGroup
from thinwire.testing import RankPool, run_threads

KEPT = Path(__file__).with_name("same_bytes.json")
NUMEL = 9001
STEPS = 6
TOPK = "topk:ratio=1/16,bits=2,chunk=512"
TRAININGS = {
    **{
        f"{kind} {name}": {"kind": kind, "collective": Collective(algorithm=name)}
        for kind in ("AdamW", "SGD")
        for name in ("gather", "sharded")
    },
    "synchronizer topk": {"kind": "synchronizer", "compressor": TOPK},
    "synchronizer quantize": {"kind": "synchronizer", "compressor": "quantize:bits=8"},
    "synchronizer randomk": {"kind": "synchronizer", "compressor": "randomk:ratio=1/8"},
}


def whole(numel: int, seed: int, largest: int = 7) -> Tensor:
    """Whole numbers from -largest to largest, by a formula: no generator of torch has a say in it."""
    mixed = (torch.arange(numel) + 7919 * seed) * 48271 % 65521
    return (mixed % (2 * largest + 1) - largest).to(torch.float32)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def payloads() -> dict[str, str]:
    """Payload, frame and residual of every spec, by the reference and by the compiled kernels."""
    found = {}
    for backend, spec, dtype in product(("reference", "cpu"), ALL_SPECS, (torch.float32, torch.bfloat16)):
        residual = whole(NUMEL, 1)
        with kernels.force(backend):
            ct = thinwire.compressor(spec).compress(whole(NUMEL, 2, 127).to(dtype), residual, key=KEY)
        found[f"{backend} {spec} {dtype}"] = digest(ct.to_bytes() + bytes_of(residual))
    return found


def run_training(group: LocalGroup, kind: str, compressor: str = TOPK, **options: Any) -> str:
    model = Given((3000, 10, 4096))
    policy = thinwire.Policy(compressor, min_numel=100)
    if kind == "synchronizer":
        sync = thinwire.Synchronizer(policy, group=group, **options)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)
    else:
        numbers = {"betas": (0.5, 0.75), "eps": 2**-10} if kind == "AdamW" else {"momentum": 0.5}
        optimizer = getattr(thinwire, kind)(
            model.named_parameters(), lr=2**-6, weight_decay=0.0, compressor=policy, group=group,
            **{"warmup_steps": 1, **numbers, **options},
        )  # fmt: skip
    for step in range(STEPS):
        optimizer.zero_grad()
        model([whole(one.numel(), 10 * step + group.rank + n) for n, one in enumerate(model.weights)]).backward()
        if kind == "synchronizer":
            sync.all_reduce_gradients(model.named_parameters())
        optimizer.step()
    return digest(b"".join(bytes_of(parameter.detach()) for parameter in model.parameters()))


def trainings() -> dict[str, str]:
    """Weights, which must be alike on both ranks."""
    found = {}
    for name, options in TRAININGS.items():
        one, other = run_threads(lambda group, given=options: run_training(group, **given), 2)
        assert one == other, f"{name}: ranks differ"
        found[name] = one
    return found


def checkpoint_files(ranks: RankPool, cwd: Path) -> dict[str, list[str]]:
    """What `thinwire train` leaves; sizes depend on pickle, so names alone."""
    folder = Path("run")
    assert train(ranks, 2, changed(SMALL, out=folder, steps=4, checkpoint_every=4), cwd).finished
    return {"run": sorted(str(path.relative_to(cwd / folder)) for path in (cwd / folder).rglob("*") if path.is_file())}


PARTS: dict[str, Callable[[RankPool, Path], Mapping[str, Any]]] = {
    "payloads": lambda *_: payloads(), "trainings": lambda *_: trainings(), "files": checkpoint_files,
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_everything_is_as_it_was(part: str, ranks: RankPool, tmp_path: Path) -> None:
    found, kept = PARTS[part](ranks, tmp_path), json.loads(KEPT.read_text())[part]
    assert found.keys() == kept.keys(), sorted(found.keys() ^ kept.keys())
    assert not [name for name in found if found[name] != kept[name]]


if __name__ == "__main__":
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        rows = {name: part(pool, Path(folder)) for name, part in PARTS.items()}
    KEPT.write_text(json.dumps(rows, indent=1) + "\n")
