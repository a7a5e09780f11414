"""Ranks as threads of one process on one GPU: the bits of the CPU, whatever the streams do meanwhile."""

import time

import torch
from torch import Tensor

import thinwire
from thinwire.collectives.local import LocalGroup, LocalWorld
from thinwire.collectives.transport.local_link import LocalLink, Switchboard

WORLD, NUMEL, STEPS = 4, 100_003, 5
CASES = [("topk:ratio=1/64,bits=2", "gather"), ("quantize:bits=8", "sharded"), ("quantize:bits=8", "dense")]


def reduce(group: LocalGroup, spec: str, algorithm: str, device: str) -> tuple[list[Tensor], Tensor]:
    """Sums, step after step, of tensors that are still being made when the call comes; and the residual."""
    residual, state, results = torch.zeros(NUMEL, device=device), thinwire.ShardState(), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * group.rank + step)
        tensor = torch.randn(NUMEL, generator=generator).to(device)
        if device == "cuda":
            torch.cuda._sleep(2_000_000)
        tensor.mul_(1 + group.rank)
        thinwire.all_reduce_compressed(tensor, spec, residual, group=group, algorithm=algorithm, state=state)
        results.append(tensor.clone())
        tensor.fill_(torch.nan)  # must come after what the others still read
    return [result.cpu() for result in results], residual.cpu()


def test_the_same_bits_as_on_the_cpu() -> None:
    for spec, algorithm in CASES:
        there = LocalWorld(WORLD).run(reduce, spec, algorithm, "cuda")
        here = LocalWorld(WORLD).run(reduce, spec, algorithm, "cpu")
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
