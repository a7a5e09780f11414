"""Data that is kept on a GPU: its batches have the samples and the bits of the CPU's, and the host does not wait."""

import struct
import tempfile
from pathlib import Path

import torch
from test_no_waiting import no_waiting

from thinwire.tools.train.data import Text
from thinwire.tools.train.image_files import CIFAR_FILES, MNIST_FILES, RECORD
from thinwire.tools.train.images import Data, Images

COUNT, TESTS = 500, 30


def random_bytes(count: int, limit: int = 256) -> bytes:
    return torch.randint(limit, (count,), dtype=torch.uint8).numpy().tobytes()


def write_files(folder: Path) -> None:
    """Noise in the form of both MNISTs, and of CIFAR-10."""
    torch.manual_seed(0)
    for (images, labels), count in ((MNIST_FILES[:2], COUNT), (MNIST_FILES[2:], TESTS)):
        (folder / images).write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + random_bytes(count * 784))
        (folder / labels).write_bytes(struct.pack(">2I", 0x801, count) + random_bytes(count, 10))
    for name in CIFAR_FILES:
        records = [random_bytes(1, 10) + random_bytes(RECORD - 1) for _ in range(COUNT // 5)]
        (folder / name).write_bytes(b"".join(records))


def load(folder: Path, device: str) -> dict[str, Data]:
    return {
        "text": Text(32, device=device),
        **{name: Images(name, folder, device=device) for name in ("digits", "mnist", "fashion-mnist", "cifar10")},
    }


def test_batches_have_the_bits_of_the_cpu_s() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        on_cpu, on_cuda = load(Path(folder), "cpu"), load(Path(folder), "cuda")
    for name, data in on_cuda.items():
        assert data.length == on_cpu[name].length
        for start in (0, data.length - 10, 10**12):
            for ours, theirs in zip(data.batch(start, 64, seed=3), on_cpu[name].batch(start, 64, seed=3), strict=True):
                assert ours.device.type == "cuda", name
                assert ours.dtype == theirs.dtype, name
                assert torch.equal(ours.cpu(), theirs), (name, start)
        for batch, other in zip(data.validation(7), on_cpu[name].validation(7), strict=True):
            assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(batch, other, strict=True)), name


def test_a_batch_does_not_wait() -> None:
    """But for the first one of an epoch, whose order is copied to the device."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        sets = load(Path(folder), "cuda")
    for data in sets.values():
        data.batch(0, 16, seed=0)
        with no_waiting():
            for start in range(16, 320, 16):
                data.batch(start, 16, seed=0)
            for _ in data.validation(16):
                pass
