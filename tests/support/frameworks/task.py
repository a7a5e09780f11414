"""The training that all programs of this folder do: the same weights, batches and options at every step."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCH = 16
OPTIONS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.0, "warmup_steps": 5}
CLASSES, WIDTH = 10, 64


class Net(nn.Module):
    """A model that returns its loss, as the Trainer of Transformers wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, CLASSES)
        )

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.layers, inputs, labels)}


def loss_of(layers: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(layers(inputs), labels)


class Samples(Dataset[dict[str, Tensor]]):
    """Samples in the order of the training: batch n, of BATCH samples, is that of rank n % ranks at step n // ranks."""

    def __init__(self, steps: int, ranks: int) -> None:
        self._length = steps * ranks * BATCH
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(1 << 12, WIDTH, generator=generator)
        self._labels = (self._inputs @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = index % len(self._inputs)
        return {"inputs": self._inputs[row], "labels": self._labels[row]}


def batches(first: int, last: int) -> DataLoader[dict[str, Tensor]]:
    """The batches of this rank for the steps from `first` to `last` - 1."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = range(first * ranks + rank, last * ranks, ranks)
    rows = [list(range(number * BATCH, (number + 1) * BATCH)) for number in numbers]
    return DataLoader(Samples(last, ranks), batch_sampler=rows)


def save(folder: Path, name: str, model: nn.Module) -> None:
    """The weights of each rank, by their names in `Net`."""
    state = {key[key.index("layers.") :]: tensor for key, tensor in model.state_dict().items()}
    torch.save(state, folder / f"{name}-{dist.get_rank()}.pt")


def write(folder: Path, result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
