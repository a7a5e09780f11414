"""On a GPU nothing on the path of a step makes the host wait for the device, and nothing is allocated once it runs.

torch warns where the host waits, but for the one wait that gloo needs: its bytes must have left
the device before they can be sent. That is an explicit one, in a thread of the collectives."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from gpu_script import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.kernels import recording

NUMEL = 100_003
SPECS = ["topk:ratio=1/64,bits=2", "quantize:bits=8", "quantize:bits=1", "none"]
STEPS = 10
RECORDED = 7
"""By this step everything is recorded: two are warm-up, two more are alike, and DDP makes its buckets anew once."""


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fails if the host waited for the device, in any thread, and says where."""
    places = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            places.append("".join(traceback.format_stack(limit=9)[:-1]))

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not places, f"the host waited {len(places)} times, first here:\n{places[0]}"


def test_a_compressor_does_not_wait() -> None:
    """And allocates nothing once it runs."""
    for spec, dtype in product(SPECS, (torch.float32, torch.bfloat16)):
        compressor, tensor = thinwire.compressor(spec), torch.randn(NUMEL, device="cuda").to(dtype)
        residual, out = torch.zeros(NUMEL, device="cuda"), torch.zeros(NUMEL, dtype=dtype, device="cuda")
        compressor.compress(tensor, residual)  # compiles
        for turn in range(12):
            with no_waiting():
                ct = compressor.compress(tensor)
                ct = compressor.encode(tensor, residual, counted=True)
                compressor.commit(ct, tensor, residual, finite=True)
                compressor.decompress(ct, out)
                compressor.accumulate(ct, out)
            if turn == 3:
                before = torch.cuda.memory_stats()
        after = torch.cuda.memory_stats()
        for name in ("num_device_alloc", "reserved_bytes.all.current"):
            assert after.get(name, 0) == before.get(name, 0), (spec, name)
        assert ct.finite
        assert compressor.stats.nonfinite == 0
        tensor[NUMEL // 2], kept = torch.inf, residual.clone()
        with no_waiting():
            ct = compressor.encode(tensor, residual, counted=True)
        assert not ct.finite
        assert compressor.stats.nonfinite == 1
        assert not compressor.compress(tensor, residual).finite
        assert torch.equal(residual, kept)
        assert bool(compressor.decompress(ct).isnan().any())


def test_work_is_recorded_again_after_all_recordings_have_gone() -> None:
    """Memory that the first recording has allocated is still in use then."""
    memory, source = recording.RecordingMemory(), torch.ones(1000, device="cuda")
    kept = []
    for key in range(3):  # as if addresses had changed twice
        made = recording.Recording(memory)
        runs = [made.run(key, lambda: kept.append(source * 2)) for _ in range(4)]
        assert runs == [False, False, False, True]
        del made
    assert all(bool((each == 2).all()) for each in kept[:2])


# Two ranks on one GPU, over gloo --------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.GELU(), nn.Linear(400, 300), nn.GELU(), nn.Linear(300, 10)).cuda()


class Training:
    """A model, its optimizer, and the data of some steps, all of it on the device."""

    def __init__(self, kind: str) -> None:
        self.module = DistributedDataParallel(model(), device_ids=[0])
        if kind == "attach":
            self.optimizer: Any = torch.optim.SGD(self.module.parameters(), lr=0.01)
            self.sync: Any = thinwire.attach(self.module, SPECS[0])
        else:
            settings: dict[str, Any] = {"warmup_steps": 2, "lr": 1e-3}
            if "clipped" in kind:
                settings["max_grad_norm"] = 0.01
            self.optimizer = getattr(thinwire, kind.split()[0])(self.module, **settings)
            self.sync = self.optimizer.sync
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.data = torch.randn(STEPS, 32, 300, generator=generator).cuda()

    def run(self, stop: int = STEPS, start: int = 0) -> "Training":
        for step in range(start, stop):
            self.optimizer.zero_grad()
            self.module(self.data[step]).square().mean().backward()
            self.optimizer.step()
        return self

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


def not_recorded(kind: str) -> list[torch.Tensor]:
    """Every kernel started by Python, at every step."""
    usual, recording._RUNS_BEFORE = recording._RUNS_BEFORE, 1 << 30
    try:
        return Training(kind).run().parameters()
    finally:
        recording._RUNS_BEFORE = usual


def rank_main(rank: int) -> None:
    check_whole_tensors()
    for kind in ("attach", "AdamW", "SGD", "AdamW clipped"):
        expected = not_recorded(kind)
        training = Training(kind).run(RECORDED)
        before = torch.cuda.memory_stats()
        for _ in range(2):  # no further: second moments are averaged at step 16
            training.run(3)
        assert torch.cuda.memory_stats()["num_device_alloc"] == before["num_device_alloc"], kind
        training = Training(kind).run(RECORDED)
        with no_waiting():
            training.run(start=RECORDED)
        assert training.sync.stats.skipped == 0
        slots = training.sync.last_step.slots_used
        assert {kernel for slot in slots for kernel in slot.request.plan.first.stats.kernels} == {"cuda"}, kind
        if kind.startswith("AdamW"):
            recorder, landing = training.sync.recorder, training.optimizer._recorder.recording
            recordings = [landing, *(recorder._recordings[slot] for slot in slots)]
            packs_clipped = "clipped" in kind  # by a factor that is in other memory at every step
            assert sum(one is None or one._graph is None for one in recordings) <= packs_clipped, kind
        found = training.parameters()
        assert all(map(torch.equal, expected, found)), f"{kind}: not the bits of a training without recordings"
        if kind != "attach":
            check_poison(kind)
        print(kind, "ok", flush=True)
    check_all_reduce()


def check_whole_tensors() -> None:
    """What cannot be recorded is not: `chunk=none` copies constants from the host."""
    module = DistributedDataParallel(model(), device_ids=[0])
    optimizer = thinwire.AdamW(module, lr=1e-3, compressor="topk:ratio=1/64,bits=2,chunk=none")
    for _ in range(RECORDED):
        optimizer.zero_grad()
        module(torch.ones(8, 300, device="cuda")).square().mean().backward()
        optimizer.step()
    assert optimizer.sync.steps == RECORDED


def check_poison(kind: str) -> None:
    """A NaN on rank 0: the step is skipped, and residuals are what they were, bit for bit."""
    training = Training(kind).run(RECORDED)
    kept = {name: residual.clone() for name, residual in training.sync.residuals.items()}
    parameters = training.parameters()
    if dist.get_rank() == 0:
        training.data[0] = torch.nan
    training.run(1)
    assert training.sync.stats.skipped == 1
    assert all(map(torch.equal, parameters, training.parameters()))
    for name, residual in training.sync.residuals.items():
        assert torch.equal(residual, kept[name]), name


def check_all_reduce() -> None:
    """Every algorithm, and a residual after a peer's NaN."""
    for spec, algorithm in ((SPECS[0], "gather"), (SPECS[0], "sharded"), (SPECS[1], "sharded")):
        residual, state = torch.zeros(NUMEL, device="cuda"), thinwire.ShardState() if algorithm == "sharded" else None
        for step in range(4):
            tensor = torch.randn(NUMEL, device="cuda")
            if step == 3:
                kept = residual.clone()
                tensor[5] = torch.nan if dist.get_rank() == 0 else 1.0
            waits = no_waiting() if step else warnings.catch_warnings()
            with waits:
                report = thinwire.all_reduce_compressed(
                    tensor, spec, residual, algorithm=algorithm, state=state, key=step
                ).report
        assert not report.finite
        assert bool(tensor.isnan().all())
        assert torch.equal(residual, kept), (spec, algorithm)


def test_two_ranks_do_not_wait() -> None:
    run_ranks(rank_main, 2)
