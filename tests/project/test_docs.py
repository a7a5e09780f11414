"""Every block of Python in the docs runs; the bytes that docs/wire-format.md shows; tests that are named are there.

Names that a block takes for granted, such as `model`, have stand-ins. A block ```hex holds bytes in hex, with
`# comments`; the ```python block before it leaves the same in `frame`.
"""

import ast
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import thinwire
from support.pages import ROOT, Block, blocks, python_of
from thinwire import CompressedTensor, kernels
from thinwire.testing import inject

BLOCKS = [block for block in blocks() if python_of(block) is not None]
EXCEPTIONS = {("frameworks.md", "diff"): "parts of examples/with_*.py, which tests/project/test_examples.py runs"}
ALTERNATIVES = ['sync = thinwire.attach(ddp, "auto")']
"""First words of blocks whose statements are alternatives, each for a model of its own."""


class Model(nn.Module):
    """A model with two blocks that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 8)

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).square().mean()


def train_process(rank: int, world_size: int, faults: list[Any]) -> None:
    """A loop of one rank, in which faults happen; it ends when another rank is lost."""
    for step in range(5):
        with inject(faults, step):
            try:
                thinwire.all_reduce_compressed(torch.ones(64), "none", torch.zeros(64), timeout=20.0)
            except thinwire.PeerError:
                return


def taken_step(names: "StandIns") -> thinwire.AdamW:
    optimizer = thinwire.AdamW(names["ddp"], lr=1e-3)
    names["ddp"](names["batches"][0]).backward()
    optimizer.step()
    return optimizer


def loss(model: nn.Module, step: int) -> Tensor:
    found: Tensor = model(torch.full((4, 64), 1.0 + step))
    return found


def init_device_mesh(device: str, shape: tuple[int, ...], **options: Any) -> Any:
    """A mesh of the one rank that there is, on the CPU."""
    return dist.init_device_mesh("cpu", (1,) * len(shape), **options)


class StandIns(dict[str, Any]):
    """What blocks take for granted. What is in `MADE` is made when it is asked for. The group has one rank."""

    def __missing__(self, name: str) -> Any:
        self[name] = MADE[name](self)
        return self[name]


FIXED = {
    "torch": torch, "dist": dist, "dcp": dcp, "nn": nn, "thinwire": thinwire, "DDP": DistributedDataParallel,
    "DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard, "make_model": Model,
    "train_process": train_process, "CosineAnnealingLR": CosineAnnealingLR, "loss": loss, "host": "127.0.0.1",
    "init_device_mesh": init_device_mesh, "rank": 0, "world_size": 1, "nodes": 1, "path": "checkpoint", "steps": 3,
}  # fmt: skip
MADE: dict[str, Callable[[StandIns], Any]] = {
    "model": lambda names: Model(),
    "ddp": lambda names: DistributedDataParallel(names["model"]),
    "groups": lambda names: [{"params": list(names["model"].parameters()), "weight_decay": 0.1}],
    "batches": lambda names: [torch.randn(4, 64) for _ in range(3)],
    "grad": lambda names: torch.randn(10_000),
    "residual": lambda names: torch.zeros(10_000),
    "optimizer": taken_step,
    "store_of_others": lambda names: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "port": lambda names: names["store_of_others"].port,
    "state_of_torchs_adamw": lambda names: torch.optim.AdamW(names["model"].parameters()).state_dict(),
    "decay": lambda names: [parameter for parameter in names["model"].parameters() if parameter.ndim > 1],
    "rest": lambda names: [parameter for parameter in names["model"].parameters() if parameter.ndim < 2],
}


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, and an empty folder."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(block: Block) -> None:
    """Run a block with stand-ins for the names that it uses and does not set."""
    module = ast.parse(python_of(block) or "", filename=str(block))
    alternatives = block.text.startswith(tuple(ALTERNATIVES))
    for statements in [[one] for one in module.body] if alternatives else [module.body]:
        code = ast.Module(statements, type_ignores=[])
        names = [node for node in ast.walk(code) if isinstance(node, ast.Name)]
        taken = {name.id for name in names} - {name.id for name in names if isinstance(name.ctx, ast.Store)}
        stand_ins = StandIns(FIXED)
        given = {name: stand_ins[name] for name in sorted(taken & {*FIXED, *MADE})}
        try:
            exec(compile(code, str(block), "exec"), given)
        except NameError as error:
            error.add_note(f"{block} takes it for granted: give it a stand-in in {Path(__file__).name}")
            raise


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_it_runs(block: Block) -> None:
    if (block.page, block.language) in EXCEPTIONS:
        return
    run(block)


def test_exceptions_are_needed_and_a_block_that_is_wrong_fails() -> None:
    assert {(block.page, block.language) for block in BLOCKS} >= EXCEPTIONS.keys()
    assert all(any(block.text.startswith(start) for block in BLOCKS) for start in ALTERNATIVES)
    with pytest.raises(TypeError, match="frobnicate"):
        run(Block("page.md", 1, "diff", "- old\n+ thinwire.Policy('none', frobnicate=1)\n"))
    with pytest.raises(NameError, match="unheard_of"):
        run(Block("page.md", 1, "python", "unheard_of\n"))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_worked_examples(backend: str) -> None:
    shown, code = 0, ""
    for block in blocks():
        if block.page == "wire-format.md" and block.language == "python":
            code = block.text
        elif block.page == "wire-format.md" and block.language == "hex":
            expected = bytes.fromhex(" ".join(line.partition("#")[0] for line in block.text.splitlines()))
            names: dict[str, bytes] = {}
            with kernels.force(backend):
                exec(code, names)
            assert names["frame"].hex(" ") == expected.hex(" ")
            assert CompressedTensor.from_bytes(expected).to_bytes() == expected
            shown += 1
    assert shown, "wire-format.md shows no frame in hex"


def test_tests_that_are_named_are_there() -> None:
    pages = (ROOT / "docs").glob("*.md")
    named = {name: page.name for page in pages for name in re.findall(r"`(tests/[\w/]+\.py)`", page.read_text())}
    assert len(named) > 15
    assert not {name: page for name, page in named.items() if not (ROOT / name).is_file()}


def test_planted_mistakes_fit_the_library_and_name_tests_that_are_there() -> None:
    """`python benchmarks/mutants.py` plants them, which takes too long for every run of the tests."""
    mutants = runpy.run_path(str(ROOT / "benchmarks" / "mutants.py"))["read_mutants"]()
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        compile(mutant.mutated(), mutant.file, "exec")  # raises if it does not fit, and says which it is
        for test in mutant.tests:
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text()
            assert f"def {name.partition('[')[0]}(" in text, f"{mutant.number} {mutant.file}: {test} does not exist"
