"""What an operation leaves behind: nothing, neither in this process nor in the store."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from ranks import Ranks, meet
from thinwire.collectives.watch import watch

SPEC = "quantize:bits=8"


def call(numel: int = 5000, spec: str = SPEC, **options: Any) -> None:
    tensor = torch.full((numel,), 127.0)
    thinwire.all_reduce_compressed(tensor, spec, **options)
    assert (tensor == 127 * dist.get_world_size(options.get("group"))).all()


def held() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def fail_often(rank: int, world_size: int, spec: str) -> list[tuple[int, int]]:
    seen, tensors = [], []
    for turn in range(6):
        tensor = torch.ones(9000 + rank)
        tensors.append(weakref.ref(tensor))
        with pytest.raises(thinwire.MismatchError):
            thinwire.all_reduce_compressed(tensor, spec, timeout=20.0)
        del tensor
        meet(f"turn {turn}", world_size)
        call(spec=spec)
        seen.append(held())
    assert not any(tensor() is not None for tensor in tensors), "a failed call keeps its tensor"
    assert not watch._since
    return seen


@pytest.mark.parametrize("spec", [SPEC, "none"])
def test_failed_calls_keep_nothing(ranks: Ranks, spec: str) -> None:
    for seen in ranks.run(fail_often, 2, spec):
        descriptors, threads = zip(*seen, strict=True)
        assert descriptors[-1] <= descriptors[0] + 2, seen
        assert threads[-1] <= threads[0] + 3, seen


def make_and_destroy(rank: int, world_size: int) -> list[tuple[int, int]]:
    seen = []
    for turn in range(6):
        group = dist.new_group(list(range(world_size)))
        for spec in (SPEC, "none"):
            call(spec=spec, group=group, timeout=20.0)
        meet(f"turn {turn}", world_size)
        dist.destroy_process_group(group)
        del group
        seen.append(held())
    return seen


def test_destroyed_groups_keep_nothing(ranks: Ranks) -> None:
    for seen in ranks.run(make_and_destroy, 3):
        descriptors, threads = zip(*seen, strict=True)
        assert descriptors[-1] <= descriptors[1] + 2, seen
        assert threads[-1] <= threads[1] + 3, seen


AGAIN = """
    import torch, torch.distributed as dist, thinwire
    for life in range(3):
        dist.init_process_group("gloo")
        tensor = torch.full((5000 + life,), 127.0)
        thinwire.all_reduce_compressed(tensor, "quantize:bits=8", timeout=20.0)
        assert (tensor == 254).all()
        dist.destroy_process_group()
    print("all", "lived")
"""


def test_torch_can_be_initialised_again(tmp_path: Path) -> None:
    """Under torchrun the store outlives the group: what the first group wrote there must not be read by the second."""
    script = tmp_path / "again.py"
    script.write_text(textwrap.dedent(AGAIN))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all lived") == 2


def refuse_the_time_out(rank: int, world_size: int) -> list[float]:
    """A call with a wrong argument counts as a call: the next ones still meet their own."""
    results = []
    for value, timeout in ((1.0, -1.0), (2.0, 20.0)):
        tensor = torch.full((5000,), value)
        expected = ValueError if rank == 1 else thinwire.MismatchError
        if timeout < 0:
            with pytest.raises(expected, match="timeout -1"):
                thinwire.all_reduce_compressed(tensor, SPEC, timeout=timeout if rank == 1 else 20.0)
        else:
            thinwire.all_reduce_compressed(tensor, SPEC, timeout=timeout)
            results.append(float(tensor[0]))
    return results


def test_a_wrong_argument_does_not_shift_the_calls(ranks: Ranks) -> None:
    for results in ranks.run(refuse_the_time_out, 2):
        assert results == [pytest.approx(4.0, rel=0.01)]


def new_shapes(rank: int, world_size: int) -> int:
    counts = []
    for turn in range(40):
        call(5000 + turn)
        if turn in (9, 39):
            meet(f"turn {turn}", world_size)
            counts.append(dist.group.WORLD.get_group_store().num_keys())
            meet(f"counted {turn}", world_size)
    return counts[1] - counts[0]


def test_new_shapes_do_not_fill_the_store(ranks: Ranks) -> None:
    """Thirty more shapes on two ranks: only the slots in which ranks say where they are, and what `meet` writes."""
    for more in ranks.run(new_shapes, 2):
        assert more <= 2 * 30 + 10


def uneven_calls(rank: int, world_size: int) -> None:
    """Ranks of a node whose groups between nodes have seen different numbers of calls."""
    mesh = init_device_mesh("cpu", (2, 2))
    if rank in (0, 2):
        call(group=mesh.get_group(0))
    tensor = torch.ones(9000)
    work = thinwire.all_reduce_compressed(tensor, "randomk:ratio=1/2", torch.zeros(9000), group=mesh, timeout=20.0)
    assert work.report.algorithm == "hierarchical, values"


def test_numbers_of_calls_may_differ_between_groups(ranks: Ranks) -> None:
    ranks.run(uneven_calls, 4)
