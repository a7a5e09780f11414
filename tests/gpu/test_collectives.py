"""The compressed all-reduce on CUDA tensors: gloo with two ranks on one GPU, NCCL with one, threads of one process.

Results equal those of the CPU, between threads bit for bit, whatever the streams do meanwhile.
"""

import time
from itertools import product

import torch
import torch.distributed as dist
from gpu_script import run_ranks
from torch import Tensor

import thinwire
from thinwire import kernels
from thinwire.collectives.local import LocalGroup, LocalWorld
from thinwire.collectives.transport.link import NcclLink
from thinwire.collectives.transport.local_link import LocalLink, Switchboard

NUMEL, STEPS = 100_003, 4
CASES = [
    ("topk:ratio=1/64,bits=2", "gather"),
    ("topk:ratio=1/64,bits=2", "sharded"),
    ("topk:ratio=1/64,bits=2", "dense"),
    ("quantize:bits=8", "sharded"),
    ("randomk:ratio=1/64", "values"),
    ("none", "auto"),
]


def train(spec: str, algorithm: str, dtype: torch.dtype, device: str, asynchronous: bool) -> tuple[Tensor, Tensor]:
    """The last result and the residual after some steps."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    residual = None if spec == "none" else torch.zeros(NUMEL, device=device)
    state = thinwire.ShardState() if algorithm == "sharded" else None
    tensor = torch.empty(NUMEL, dtype=dtype, device=device)
    for step in range(STEPS):
        tensor.copy_(torch.randn(NUMEL, generator=generator))
        tensor.mul_(2)  # on the caller's stream: the operation must come after it, and what follows after the operation
        work = thinwire.all_reduce_compressed(
            tensor, spec, residual, algorithm=algorithm, state=state, key=step, async_op=asynchronous,
            op=dist.ReduceOp.AVG,
        )  # fmt: skip
        work.wait()
        result = tensor.clone()
    return result.cpu(), torch.zeros(NUMEL) if residual is None else residual.cpu()


def worker(rank: int) -> None:
    on_nccl, world = dist.get_backend() == "nccl", dist.get_world_size()
    for (spec, algorithm), dtype, asynchronous in product(CASES, (torch.float32, torch.bfloat16), (False, True)):
        on_gpu = train(spec, algorithm, dtype, "cuda", asynchronous)
        if not on_nccl:
            with kernels.force("reference"):
                on_cpu = train(spec, algorithm, dtype, "cpu", asynchronous)
            for name, gpu, cpu in zip(("result", "residual"), on_gpu, on_cpu, strict=True):
                close = torch.isclose(gpu.float(), cpu.float(), rtol=1e-2, atol=1e-2)
                label = f"{spec} {algorithm} {dtype} {name}: {int((~close).sum())} of {NUMEL} differ"
                assert int((~close).sum()) <= NUMEL // 1000, label  # a tie may round differently
            gathered = [torch.empty_like(on_gpu[0]) for _ in range(world)]
            dist.all_gather(gathered, on_gpu[0])
            assert all(torch.equal(on_gpu[0], other) for other in gathered), f"{spec} {algorithm}: ranks differ"
    if on_nccl:  # it refuses two ranks on one GPU; a message to itself takes the same way
        sent, received = torch.arange(99, device="cuda", dtype=torch.uint8), torch.zeros(99, device="cuda").byte()
        NcclLink([0], 0, 30.0).post({0: sent}, {0: received}, 0)(time.monotonic() + 30, lambda peer: None)
        assert torch.equal(sent, received)
    tensor, residual = torch.ones(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
    tensor[7] = torch.nan if rank == 0 else 1
    report = thinwire.all_reduce_compressed(tensor, "topk:ratio=1/64,bits=2", residual).report
    assert not report.finite
    assert bool(tensor.isnan().all())
    assert not bool(residual.any())


def test_gloo_with_two_ranks_on_one_gpu() -> None:
    run_ranks(worker, 2)


def test_nccl_with_one_rank() -> None:
    run_ranks(worker, 1, "nccl")


def reduce(group: LocalGroup, spec: str, algorithm: str, device: str) -> tuple[list[Tensor], Tensor]:
    """Sums, step after step, of tensors that are still being made when the call comes; and the residual."""
    residual, state, results = torch.zeros(NUMEL, device=device), thinwire.ShardState(), []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * group.rank + step)
        tensor = torch.randn(NUMEL, generator=generator).to(device)
        if device == "cuda":
            torch.cuda._sleep(2_000_000)
        tensor.mul_(1 + group.rank)
        thinwire.all_reduce_compressed(tensor, spec, residual, group=group, algorithm=algorithm, state=state)
        results.append(tensor.clone())
        tensor.fill_(torch.nan)  # must come after what the others still read
    return [result.cpu() for result in results], residual.cpu()


def test_threads_have_the_same_bits_as_on_the_cpu() -> None:
    topk, quantize = CASES[0][0], CASES[3][0]
    for spec, algorithm in ((topk, "gather"), (quantize, "sharded"), (quantize, "dense")):
        there = LocalWorld(4).run(reduce, spec, algorithm, "cuda")
        here = LocalWorld(4).run(reduce, spec, algorithm, "cpu")
        for (gpu, gpu_kept), (cpu, cpu_kept) in zip(there, here, strict=True):
            assert all(map(torch.equal, gpu, cpu)), (spec, algorithm)
            assert torch.equal(gpu_kept, cpu_kept), (spec, algorithm)


def test_a_buffer_is_read_after_it_is_filled_and_before_it_is_used_again() -> None:
    board, numel = Switchboard(2), 1 << 22

    def work(group: LocalGroup) -> bool:
        right, link = True, LocalLink(board, group.rank)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            sent = torch.zeros(numel, dtype=torch.uint8, device="cuda")
            for turn in range(20):
                received = torch.zeros(numel, dtype=torch.uint8, device="cuda")
                torch.cuda._sleep(1_000_000 * (1 + group.rank))
                sent.fill_(2 * turn + group.rank)
                peer = 1 - group.rank
                link.post({peer: sent}, {peer: received}, turn)(time.monotonic() + 60, int)
                sent.fill_(255)
                right = right and bool((received == 2 * turn + peer).all())
        return right

    assert LocalWorld(2).run(work) == [True, True]
