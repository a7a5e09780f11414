"""Whole steps with the Triton kernels, in Triton's interpreter: what collectives and optimizers make of them.

TRITON_INTERPRET=1 python tests/support/triton_steps.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire import kernels
from thinwire.collectives.local import LocalGroup, LocalWorld

SPEC = "topk:ratio=1/64,bits=2"
NUMEL = 4300


def compressors_count_and_take_back() -> None:
    """Through `Compressor`: which kernels ran, what is counted, and what a NaN leaves behind."""
    for spec in (SPEC, "quantize:bits=8", "none"):
        compressor = thinwire.compressor(spec)
        tensor, residual = torch.randn(NUMEL), torch.randn(NUMEL)
        before = residual.clone()
        ct = compressor.compress(tensor, residual, key=3)
        assert (ct.kernels, ct.finite, compressor.stats.nonfinite) == ("cuda", True, 0)
        torch.testing.assert_close(compressor.decompress(ct) + residual, tensor + before)
        again = residual.clone()
        tensor[9] = torch.inf
        assert not compressor.compress(tensor, residual, key=5).finite
        assert compressor.stats.nonfinite == 1
        assert torch.equal(residual, again)


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


def collectives_change_nothing_unless_it_counts() -> None:
    for algorithm in ("gather", "sharded"):
        there = LocalWorld(2, turns=True).run(reduce, algorithm)
        with kernels.force("cpu"):
            here = LocalWorld(2, turns=True).run(reduce, algorithm)
        for (total, kept, after), (cpu_total, cpu_kept, _) in zip(there, here, strict=True):
            assert torch.equal(total, cpu_total), algorithm
            assert torch.equal(kept, cpu_kept), algorithm
            assert torch.equal(after, kept), algorithm


def optimizers_train() -> None:
    """The same training as with the kernels of the CPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for kind in (thinwire.AdamW, thinwire.SGD):
        trained = []
        for backend in ("cuda", "cpu"):
            torch.manual_seed(0)
            module, compressor = nn.Linear(90, 50), thinwire.compressor(SPEC)
            before = module.weight.detach().clone()
            with kernels.force(backend):
                optimizer = kind(module, lr=1e-2, compressor=compressor, warmup_steps=1)
                for _ in range(4):
                    optimizer.zero_grad()
                    module(torch.randn(8, 90)).square().mean().backward()
                    optimizer.step()
            assert compressor.stats.kernels == {backend: 3}, "other kernels ran"
            trained.append(module.weight.detach().clone())
            assert not torch.equal(trained[-1], before)
        torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


if __name__ == "__main__":
    kernels._DEVICES["cuda"] = "cpu"  # what the interpreter needs
    with kernels.force("cuda"):
        compressors_count_and_take_back()
        collectives_change_nothing_unless_it_counts()
        optimizers_train()
