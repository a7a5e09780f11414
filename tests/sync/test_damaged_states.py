"""States and manifests of any content: an error in words, and never memory in proportion to a number in them."""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import thinwire
from thinwire.sync.checkpoint import FORMAT, DamagedError, choose, old_ranks

GOOD = {
    "format": FORMAT, "rank": 0, "world_size": 1, "policy": {}, "options": {}, "steps": 3, "scale": 1.0, "entries": {},
    "layout": [], "residuals": {}, "owners": [], "shared": {},
}  # fmt: skip


@pytest.mark.parametrize("world_size", [0, -1, -(10**9)])
def test_a_run_without_ranks_is_damaged(world_size: int) -> None:
    with pytest.raises(DamagedError, match="expected 1 or more"):
        old_ranks(0, 2, world_size)


def test_a_huge_world_takes_no_memory() -> None:
    assert len(old_ranks(1, 2, 10**12)) == 5 * 10**11
    with pytest.raises(ValueError, match="needs the state of rank 1 of the 1000000000000 that were saved"):
        choose({**GOOD, "world_size": 10**12}, 0, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", "2"), ("world_size", True), ("world_size", 0), ("world_size", 1.0), ("rank", -1), ("rank", 1),
        ("rank", None), ("steps", "3"), ("steps", -1), ("scale", "1"), ("entries", 3), ("layout", {}),
        ("residuals", []), ("owners", "none"), ("options", None),
    ],
)  # fmt: skip
def test_values_of_other_types_are_damage(name: str, value: object) -> None:
    assert choose(GOOD, 0, 1).same_world
    with pytest.raises(DamagedError, match="damaged"):
        choose({**GOOD, name: value}, 0, 1)


@pytest.mark.parametrize("value", [1, None, "2", {"a": 1}, [2] * 1000, 10**100])
def test_another_format_is_one_short_line(value: object) -> None:
    with pytest.raises(ValueError, match=r"a checkpoint of format .*, expected") as error:
        choose({**GOOD, "format": value}, 0, 1)
    assert len(str(error.value)) < 400


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def saved(folder: Path, **ranks: bytes) -> Path:
    """A checkpoint of torch.distributed.checkpoint with these bytes as the states of ranks."""
    states = {
        name: {"rest": torch.frombuffer(bytearray(content), dtype=torch.uint8)} for name, content in ranks.items()
    }
    dcp.save({"owner": states}, checkpoint_id=folder, no_dist=True)
    return folder


def packed(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "content",
    [b"?", packed({"a": {"thinwire tensor": "missing"}}), packed({"a": {"thinwire tensor": [1]}}), pickle.dumps(print)],
    ids=["noise", "a tensor that is missing", "a tensor without a name", "a pickle"],
)
def test_a_state_of_any_content_is_one_line(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"the state of rank 0 in .* cannot be read: "):
        thinwire.load_per_rank(saved(tmp_path / "saved", rank0=content), "owner")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_a_rank_of_any_number_takes_no_memory(tmp_path: Path) -> None:
    good = packed({})
    with pytest.raises(ValueError, match="the state of rank 1 of 1000000001 is missing"):
        thinwire.load_per_rank(saved(tmp_path / "saved", rank0=good, rank1000000000=good), "owner")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_sizes_that_the_files_do_not_have_take_no_memory(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", rank0=packed({}))
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["owner.rank0.rest"].size = torch.Size([10**15])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="lists 1,000,000,000,000,000 bytes of rank 0, but its files have"):
        thinwire.load_per_rank(folder, "owner")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("content", [b"", b"?", pickle.dumps([1])], ids=["empty", "noise", "a list"])
def test_metadata_of_any_content_is_one_line(content: bytes, tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", rank0=packed({}))
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(DamagedError, match="has no metadata of"):
        thinwire.load_per_rank(folder, "owner")
