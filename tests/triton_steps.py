"""Whole steps with the Triton kernels, in Triton's interpreter: what collectives and optimizers make of them.

TRITON_INTERPRET=1 python tests/triton_steps.py
"""

import threading

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire import kernels
from thinwire.collectives.local import LocalGroup, LocalWorld
from thinwire.kernels.cuda import topk

SPEC = "topk:ratio=1/64,bits=2"
NUMEL = 4300


def compressors_count_and_take_back() -> None:
    """Through `Compressor`: which kernels ran, what is counted, and what a NaN leaves behind."""
    for spec in (SPEC, "quantize:bits=8", "randomk:ratio=1/64", "none"):
        compressor = thinwire.compressor(spec)
        tensor, residual = torch.randn(NUMEL), torch.randn(NUMEL)
        before = residual.clone()
        ct = compressor.compress(tensor, residual, key=3)
        assert (ct.kernels, ct.finite, compressor.stats.nonfinite) == ("cuda", True, 0)
        torch.testing.assert_close(compressor.decompress(ct) + residual, tensor + before)
        pending = compressor.begin(tensor, residual, key=4)
        pending.settle(False)
        torch.testing.assert_close(residual, before + tensor - compressor.decompress(ct), rtol=1e-5, atol=1e-6)
        pending.settle(False)  # twice changes nothing
        again = residual.clone()
        tensor[9] = torch.inf
        assert not compressor.compress(tensor, residual, key=5).finite
        assert compressor.stats.nonfinite == 1
        torch.testing.assert_close(residual, again, rtol=1e-5, atol=1e-6)


def reduce(group: LocalGroup, algorithm: str) -> tuple[Tensor, Tensor, Tensor]:
    """Two steps that count, then one in which rank 1 has a NaN: the last sum, and the residual before and after."""
    residual, state = torch.zeros(NUMEL), thinwire.ShardState() if algorithm == "sharded" else None
    total = kept = residual
    for step in range(3):
        tensor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * group.rank + step))
        if step == 2:
            kept = residual.clone()
            tensor[7] = torch.nan if group.rank == 1 else 0.0
        report = thinwire.all_reduce_compressed(
            tensor, SPEC, residual, group=group, algorithm=algorithm, state=state
        ).report
        assert report.finite == (step < 2)
        total = tensor if step < 2 else total
    return total, kept, residual


def collectives_take_back_what_does_not_count() -> None:
    for algorithm in ("gather", "sharded"):
        there = LocalWorld(2).run(reduce, algorithm)
        with kernels.force("cpu"):
            here = LocalWorld(2).run(reduce, algorithm)
        for (total, kept, after), (cpu_total, cpu_kept, _) in zip(there, here, strict=True):
            assert torch.equal(total, cpu_total), algorithm
            assert torch.equal(kept, cpu_kept), algorithm
            torch.testing.assert_close(after, kept, rtol=1e-5, atol=1e-6)


def a_failure_takes_back_too() -> None:
    """Rank 1 does not come: rank 0, which has compressed by then, gets an error, and has lost nothing."""
    over, settled = threading.Event(), []
    usual = topk.undo
    topk.undo = lambda *given: settled.append(usual(*given))  # type: ignore[func-returns-value, assignment]

    def work(group: LocalGroup) -> None:
        residual = torch.zeros(NUMEL)
        tensor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(group.rank))
        thinwire.all_reduce_compressed(tensor, SPEC, residual, group=group)
        if group.rank == 1:
            assert over.wait(60)
            return
        before = residual.clone()
        try:
            thinwire.all_reduce_compressed(torch.ones(NUMEL), SPEC, residual, group=group, timeout=2)
            raise AssertionError("no error")
        except thinwire.PeerError:
            assert settled, "nothing was taken back"
            torch.testing.assert_close(residual, before, rtol=1e-5, atol=1e-6)
        finally:
            over.set()

    try:
        LocalWorld(2).run(work)
    finally:
        topk.undo = usual


def optimizers_fuse() -> None:
    """The update is made in the pass that compresses: the same training as by two passes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for kind in (thinwire.AdamW, thinwire.SGD):
        trained = []
        for fuses in (True, False):
            usual, asked = topk.fuses, []
            topk.fuses = lambda layout, fuses=fuses, asked=asked: asked.append(layout) or fuses  # type: ignore[func-returns-value]
            torch.manual_seed(0)
            module = nn.Linear(90, 50)
            optimizer = kind(module, lr=1e-2, warmup_steps=1)
            for _ in range(4):
                optimizer.zero_grad()
                module(torch.randn(8, 90)).square().mean().backward()
                optimizer.step()
            assert asked, "nobody asked whether it fuses"
            trained.append(module.weight.detach().clone())
            topk.fuses = usual
        torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-6)
        assert not torch.equal(trained[0], nn.Linear(90, 50).weight)
    dist.destroy_process_group()


CASES = [
    compressors_count_and_take_back,
    collectives_take_back_what_does_not_count,
    a_failure_takes_back_too,
    optimizers_fuse,
]

if __name__ == "__main__":
    kernels._DEVICES["cuda"] = "cpu"  # what the interpreter needs
    with kernels.force("cuda"):
        for case in CASES:
            case()
            print(case.__name__, "ok", flush=True)
