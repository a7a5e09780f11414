"""Measures the time and memory of a call on a machine that runs other work too.

Memory bandwidth drifts by a factor of two within minutes on a shared machine. Figures that are compared are therefore
measured in turns: a few repetitions of one job, a few of the next, and so on. Their medians then drift together.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from statistics import median
from typing import Any, TypedDict

import numpy as np
import torch

from thinwire.kernels.recording import Recording, RecordingMemory

Job = Callable[[], Any]
Call = Callable[[int], Any]
"""A timed function. Its argument is the index of the set of buffers that it works on."""

BURST = 3
"""Consecutive repetitions of one job: threads of the job before, which spin for a while, may slow the first down."""
PATIENCE_SECONDS = 2.0
"""A job with at least three samples gets no more once its samples add up to this many seconds."""


class Timing(TypedDict):
    """Percentiles of the samples, in milliseconds."""

    p20: float
    p50: float
    p80: float
    samples: int


def timing(samples: list[float]) -> Timing:
    """Return the percentiles of times in milliseconds."""
    p20, p50, p80 = np.percentile(samples, (20, 50, 80)).tolist()
    return {"p20": p20, "p50": p50, "p80": p80, "samples": len(samples)}


def interleave(jobs: Mapping[str, Job], repeats: int) -> dict[str, Timing]:
    """Time every job `repeats` times, in turns, after one call of each that is not timed."""
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    left = set(jobs)
    while left:
        for name in [name for name in jobs if name in left]:
            taken = samples[name]
            for _ in range(min(BURST, repeats - len(taken))):
                started = time.perf_counter()
                jobs[name]()
                taken.append(1e3 * (time.perf_counter() - started))
            if len(taken) >= repeats or (len(taken) >= 3 and sum(taken) >= 1e3 * PATIENCE_SECONDS):
                left.remove(name)
    return {name: timing(taken) for name, taken in samples.items()}


def peak_memory(job: Job, device: torch.device) -> int | None:
    """Return the peak memory of a call in bytes, beyond the memory in use before it, or None if it cannot be measured.

    On a CPU this is the resident memory of the process, which only Linux reports. What the job keeps between calls does
    not count.
    """
    if device.type == "cpu" and not (sys.platform == "linux" and os.access("/proc/self/clear_refs", os.W_OK)):
        return None
    job()
    return int(median(_peak(job, device) for _ in range(3)))


def _peak(job: Job, device: torch.device) -> int:
    if device.type == "cpu":
        before = _peak_resident(lambda: None)
        return max(0, _peak_resident(job) - before)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    job()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_resident(job: Job) -> int:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)  # freed memory that malloc holds back would hide what the job takes
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark to the memory that is resident now
    job()
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, calls: Mapping[str, tuple[Call, bool]], samples: int, sets: int) -> dict[str, Timing]:
        """Return the times of calls, on `sets` sets of buffers in turn.

        With each call goes whether a CUDA graph can hold it: it neither waits for the device nor copies from the host.
        Then the time is the device's alone. Others are slow: they get an eighth of the samples, 6 at least. On a CPU,
        calls take turns.
        """
        if self._device.type == "cuda":
            return {
                name: _time_on_cuda(call, samples if graph else max(6, samples // 8), sets, graph=graph)
                for name, (call, graph) in calls.items()
            }
        number = count()  # the same for all, so that successive calls have different gradients

        def job(call: Call) -> Job:
            return lambda: call(next(number) % sets)

        return interleave({name: job(call) for name, (call, _) in calls.items()}, samples)

    def peak(self, call: Call) -> int | None:
        return peak_memory(partial(call, 0), self._device)


def _time_on_cuda(call: Call, samples: int, sets: int, *, graph: bool) -> Timing:
    jobs: list[Job] = [partial(call, index) for index in range(sets)]
    if graph:
        recordings = [Recording(RecordingMemory()) for _ in jobs]
        jobs = [partial(recording.run, None, job) for recording, job in zip(recordings, jobs, strict=True)]
    for _ in range(4):  # compiles, fills the caches of the allocator, and records
        for job in jobs:
            job()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for index, (start, stop) in enumerate(events):
        start.record()
        jobs[index % sets]()
        stop.record()
    torch.cuda.synchronize()
    return timing([start.elapsed_time(stop) for start, stop in events])
