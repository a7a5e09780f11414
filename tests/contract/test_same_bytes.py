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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.cases import ALL_SPECS, KEY
from support.oracle import bytes_of
from support.training_runs import SMALL, changed, train
from thinwire import Collective, kernels
from thinwire.collectives import LocalGroup
from thinwire.testing import RankPool, run_threads

KEPT = Path(__file__).with_name("same_bytes.json")
NUMEL = 9001
STEPS = 6
TOPK = "topk:ratio=1/16,bits=2,chunk=512"
TRAININGS: dict[str, dict[str, Any]] = {
    "AdamW gather": {"kind": "AdamW", "collective": Collective(algorithm="gather")},
    "AdamW sharded": {"kind": "AdamW", "collective": Collective(algorithm="sharded")},
    "SGD gather": {"kind": "SGD", "collective": Collective(algorithm="gather")},
    "SGD sharded": {"kind": "SGD", "collective": Collective(algorithm="sharded")},
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
    for backend in ("reference", "cpu"):
        for spec in ALL_SPECS:
            for dtype in (torch.float32, torch.bfloat16):
                compressor = thinwire.compressor(spec)
                residual = whole(NUMEL, 1)
                with kernels.force(backend):
                    ct = compressor.compress(whole(NUMEL, 2, 127).to(dtype), residual, key=KEY)
                found[f"{backend} {spec} {dtype}"] = digest(ct.to_bytes() + bytes_of(residual))
    return found


class Net(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(whole(size, size)) for size in (3000, 10, 4096)])

    def forward(self, seed: int) -> Tensor:
        parts = [(weight * whole(weight.numel(), seed + number)).sum() for number, weight in enumerate(self.weights)]
        return torch.stack(parts).sum()


def weights_of(model: nn.Module) -> str:
    return digest(b"".join(bytes_of(parameter.detach()) for parameter in model.parameters()))


def run_training(group: LocalGroup, kind: str, compressor: str = TOPK, **options: Any) -> str:
    model = Net()
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
        model(10 * step + group.rank).backward()
        if kind == "synchronizer":
            sync.all_reduce_gradients(model.named_parameters())
        optimizer.step()
    return weights_of(model)


def trainings() -> dict[str, str]:
    """Weights, which must be alike on both ranks."""
    found = {}
    for name, options in TRAININGS.items():
        one, other = run_threads(lambda group, given=options: run_training(group, **given), 2)
        assert one == other, f"{name}: ranks differ"
        found[name] = one
    return found


def attach(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(Net())
    thinwire.attach(model, thinwire.Policy(TOPK, min_numel=100))
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(10 * step + rank).backward()
        optimizer.step()
    return weights_of(model)


def checkpoint_files(ranks: RankPool, cwd: Path) -> dict[str, list[str]]:
    """What `thinwire train` leaves, by the kind of optimizer; sizes depend on pickle, so names alone."""
    found = {}
    for optimizer in ("adamw", "sgd"):
        folder = Path(f"run-{optimizer}")
        config = changed(SMALL, out=folder, optimizer=optimizer, lr=0.01, steps=4, checkpoint_every=4)
        assert train(ranks, 2, config, cwd).finished
        names = (str(path.relative_to(cwd / folder)) for path in (cwd / folder).rglob("*") if path.is_file())
        found[optimizer] = sorted(names)
    return found


def differing(found: Mapping[str, Any], part: str) -> list[str]:
    kept = json.loads(KEPT.read_text())[part]
    assert found.keys() == kept.keys(), sorted(found.keys() ^ kept.keys())
    return [name for name in found if found[name] != kept[name]]


def test_payloads_are_those_that_were() -> None:
    assert not differing(payloads(), "payloads")


def test_weights_after_a_few_steps_are_those_that_were() -> None:
    assert not differing(trainings(), "trainings")


def test_attach_has_the_weights_that_it_had(ranks: RankPool) -> None:
    one, other = ranks.run(attach, 2)
    assert one == other
    assert not differing({"weights": one}, "attach")


def test_checkpoints_have_the_files_that_they_had(ranks: RankPool, tmp_path: Path) -> None:
    assert not differing(checkpoint_files(ranks, tmp_path), "files")


def main() -> None:
    from test_same_bytes import attach as importable

    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        rows = {
            "payloads": payloads(),
            "trainings": trainings(),
            "attach": {"weights": pool.run(importable, 2)[0]},
            "files": checkpoint_files(pool, Path(folder)),
        }
    KEPT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
