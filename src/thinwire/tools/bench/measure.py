"""Measures the time and memory of a call on a machine that runs other work too.

Memory bandwidth drifts by a factor of two within minutes on a shared machine. Figures that are compared are therefore
measured in turns: a few repetitions of one job, a few of the next, and so on. Their medians then drift together.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

Job = Callable[[], object]

BURST = 3
"""Consecutive repetitions of one job before the next job's turn.

The threads of the previous job spin for a while before they sleep and may slow the first repetition down. That sample
is counted too, but the median lies among the others.
"""
PATIENCE_SECONDS = 2.0
"""A job with at least three samples gets no more once its samples add up to this many seconds."""


@dataclass(frozen=True)
class Timing:
    """Median and 20th and 80th percentiles of the samples, in milliseconds."""

    p20: float
    p50: float
    p80: float
    samples: int

    def gb_per_s(self, nbytes: int) -> float:
        """Return the throughput in GB/s of a job that processes `nbytes` bytes in the median time."""
        return nbytes / self.p50 / 1e6


def interleave(jobs: Mapping[str, Job], repeats: int, device: torch.device) -> dict[str, Timing]:
    """Time every job `repeats` times, in turns, after one call of each that is not timed."""
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    while any(_unfinished(taken, repeats) for taken in samples.values()):
        for name, job in jobs.items():
            for _ in range(BURST):
                if _unfinished(samples[name], repeats):
                    samples[name].append(_milliseconds(job, device))
    return {
        name: Timing(percentile(taken, 20), percentile(taken, 50), percentile(taken, 80), len(taken))
        for name, taken in samples.items()
    }


def percentile(samples: list[float], percent: float) -> float:
    """Return a percentile of the samples, interpolated linearly between the two nearest ones.

    >>> percentile([4.0, 1.0, 2.0], 50), percentile([1.0, 2.0], 20)
    (2.0, 1.2)
    """
    ordered = sorted(samples)
    below, share = divmod(percent / 100 * (len(ordered) - 1), 1)
    left = ordered[int(below)]
    return left + share * (ordered[min(int(below) + 1, len(ordered) - 1)] - left)


def peak_memory(job: Job, device: torch.device, trials: int = 3) -> int | None:
    """Return the peak memory of a call in bytes, beyond the memory in use before it, or None if it cannot be measured.

    On a CPU this is the resident memory of the process, which only Linux reports. The job is called once before the
    measurement, so memory that it keeps between calls is not included.
    """
    if device.type == "cpu" and not (sys.platform == "linux" and os.access("/proc/self/clear_refs", os.W_OK)):
        return None
    job()
    measure = _peak_on_cuda if device.type == "cuda" else _peak_on_linux
    return int(median(measure(job, device) for _ in range(trials)))


def _unfinished(taken: list[float], repeats: int) -> bool:
    return len(taken) < repeats and (len(taken) < 3 or sum(taken) < 1e3 * PATIENCE_SECONDS)


def _milliseconds(job: Job, device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    job()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - started)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_on_cuda(job: Job, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    job()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_resident(job: Job) -> int:
    """Return the peak resident memory of the process in bytes while a job runs. Works on Linux only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)  # freed memory that malloc holds back would hide what the job takes
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark to the memory that is resident now
    job()
    return _status("VmHWM")


def _peak_on_linux(job: Job, device: torch.device) -> int:
    before = peak_resident(lambda: None)
    return max(0, peak_resident(job) - before)


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{key}:"))
