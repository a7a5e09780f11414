"""States and manifests of any content: an error in words, and never memory in proportion to a number in them."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import thinwire
from soak.files import change_value
from support.run import Run
from support.training import loss_of, make_net, read, written
from thinwire import Collective
from thinwire.collectives import LocalGroup
from thinwire.optim.states import check_saved
from thinwire.sync.checkpoint import FORMAT, DamagedError, choose, old_ranks
from thinwire.testing import run_threads

GOOD = {
    "format": FORMAT, "rank": 0, "world_size": 1, "policy": {}, "options": {}, "steps": 3, "scale": 1.0, "entries": {},
    "layout": [], "residuals": {}, "owners": [],
}  # fmt: skip


WRONG: list[tuple[str, object]] = [
    ("world_size", "2"), ("world_size", True), ("world_size", 0), ("world_size", 1.0), ("rank", -1), ("rank", 1),
    ("rank", None), ("steps", "3"), ("steps", -1), ("scale", "1"), ("entries", 3), ("layout", {}),
    ("residuals", []), ("owners", "none"), ("options", None), ("layout", [[{}]]), ("layout", ["weight"]),
    ("scale", 0.0), ("scale", float("nan")), ("scale", float("inf")), ("steps", 10**30),
]  # fmt: skip


def test_a_world_of_any_size_takes_no_memory() -> None:
    for world_size in (0, -1, -(10**9)):
        with pytest.raises(DamagedError, match="expected 1 or more"):
            old_ranks(0, 2, world_size)
    assert len(old_ranks(1, 2, 10**12)) == 5 * 10**11
    with pytest.raises(ValueError, match="needs the state of rank 1 of the 1000000000000 that were saved"):
        choose({**GOOD, "world_size": 10**12}, 0, 1)


def test_values_of_other_types_are_damage_and_another_format_is_one_short_line() -> None:
    assert choose(GOOD, 0, 1).same_world
    for name, value in WRONG:
        with pytest.raises(DamagedError, match="damaged"):
            pytest.fail(f"{name} {value!r}: {choose({**GOOD, name: value}, 0, 1)}")
    what_to_do = r"a checkpoint of format .*, expected 3: go on with .* new optimizer"
    for value in (1, 2, None, "3", {"a": 1}, [3] * 1000, 10**100):
        with pytest.raises(ValueError, match=what_to_do) as error:
            choose({**GOOD, "format": value}, 0, 1)
        assert len(str(error.value)) < 300


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


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_files_of_any_content_are_one_line_and_take_no_memory(tmp_path: Path) -> None:
    good = written({})
    noise, missing = b"?", written({"a": {"thinwire tensor": "missing"}})
    for number, content in enumerate((noise, missing, written({"a": {"thinwire tensor": [1]}}), pickle.dumps(print))):
        with pytest.raises(DamagedError, match=r"the state of rank 0 in .* cannot be read: "):
            thinwire.load_per_rank(saved(tmp_path / str(number), rank0=content), "owner")
    with pytest.raises(ValueError, match="the state of rank 1 of 1000000001 is missing"):
        thinwire.load_per_rank(saved(tmp_path / "ranks", rank0=good, rank1000000000=good), "owner")
    folder = saved(tmp_path / "metadata", rank0=good)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["owner.rank0.rest"].size = torch.Size([10**15])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="lists 1,000,000,000,000,000 bytes of rank 0, but its files have"):
        thinwire.load_per_rank(folder, "owner")
    for content in (b"", b"?", pickle.dumps([1])):
        path.write_bytes(content)
        with pytest.raises(DamagedError, match="has no metadata of"):
            thinwire.load_per_rank(folder, "owner")


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"warmup_steps": 2, "collective": Collective(algorithm="sharded")},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
SETTINGS: dict[str, dict[str, object]] = {
    "AdamW": {"lr": "high", "eps": -1.0, "betas": (0.9,), "compressed_betas": None, "weight_decay": 10**30},
    "SGD": {"lr": None, "momentum": 1.0, "compressed_momentum": None, "nesterov": True, "reference_lr": 0.0},
}


def load_changed(group: LocalGroup, kind: str) -> None:
    """What is wrong anywhere is refused when it is loaded, not in the next step."""
    run = Run(0, kind, group=group, **OPTIMIZERS[kind])
    run.train(0, 5)
    state, refused = read(written(run.owner.state_dict())), 0
    for number in range(60):
        draw = Random(f"{kind} {number}")
        part = change_value(draw, state["thinwire"]), change_value(draw, state["param_groups"])
        changed = {**state, "thinwire": part[0]} if draw.random() < 0.5 else {**state, "param_groups": part[1]}
        other = Run(0, kind, group=group, **OPTIMIZERS[kind])
        try:
            other.owner.load_state_dict(changed)
        except ValueError:
            refused += 1
        else:
            other.train(5, 7)
    assert refused > 30
    for name, value in SETTINGS[kind].items():
        state = read(written(run.owner.state_dict()))
        state["param_groups"][0][name] = value
        if name == "nesterov":
            state["param_groups"][0]["momentum"] = 0.0
        with pytest.raises(DamagedError, match=f"{name.removeprefix('compressed_')}.*, in a saved state"):
            run.owner.load_state_dict(state)
        del state["param_groups"][0][name]
        with pytest.raises(DamagedError, match=f"KeyError in a saved state, '{name}': the checkpoint is damaged"):
            run.owner.load_state_dict(state)
    run.train(5, 7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_that_is_loaded_can_be_trained_with(kind: str) -> None:
    run_threads(load_changed, 1, kind)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_of_torchs_optimizer_are_checked(kind: str) -> None:
    """torch itself takes them, and fails in the next step."""
    model = make_net()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    loss_of(model, 0, 0).backward()
    optimizer.step()
    check_saved(optimizer.state_dict(), optimizer)
    moment = "exp_avg" if kind == "AdamW" else "momentum_buffer"
    wide = torch.zeros(1).expand(10**11)
    good = optimizer.state_dict()
    first, (group,) = good["state"][0], good["param_groups"]
    less = {name: value for name, value in first.items() if name != moment}
    broken: list[tuple[Any, str]] = [({**good, "state": {0: less}}, "a moment of parameter 0 is missing")]
    for value in (torch.zeros(3), wide, "words", None, torch.zeros(model[0].weight.shape, dtype=torch.int64)):
        state = {**good["state"], 0: {**first, moment: value}}
        broken.append(({**good, "state": state}, f"{moment} of parameter 0 has another form"))
    for setting in ({"maximize": True}, {"betas": None}, {"momentum": 2.0}, {"params": [0]}):
        broken.append(({**good, "param_groups": [{**group, **setting}]}, "other settings"))
    for state in (None, [], {"state": 3, "param_groups": []}, {"state": {}, "param_groups": 7}):
        broken.append((state, "damaged"))
    for state, words in broken:
        with pytest.raises(DamagedError, match=words):
            check_saved(state, optimizer)
