"""Counters of a compressor's calls."""

import os
import threading
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

# One lock for all objects: it is held for nanoseconds, and a compressor with a lock could not be pickled.
_LOCK = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock in a forked child, because another thread may have held it during the fork."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass
class Statistics:
    """Counters of one compressor object. Several threads may add to them.

    >>> import torch, thinwire
    >>> c = thinwire.TopK(ratio="1/64", bits=2)
    >>> _ = c.compress(torch.randn(8192))
    >>> c.stats.calls, c.stats.bytes_before, c.stats.bytes_sent
    (1, 32768, 168)
    """

    calls: int = 0
    bytes_before: int = 0
    bytes_sent: int = 0  # Bytes of all payloads, without frame headers and without the overhead of a collective
    seconds: float = 0.0  # Seconds spent encoding. On a GPU this is the time to launch the kernels
    kernels: dict[str, int] = field(default_factory=dict)  # Number of calls for each backend
    _nonfinite: int = 0
    _on_devices: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @property
    def nonfinite(self) -> int:
        """Return the number of calls whose input contained NaN or Inf. Reading it waits for GPUs."""
        return self._nonfinite + sum(int(counter) for counter in list(self._on_devices.values()))

    @property
    def reduction(self) -> float:
        """Return bytes before / bytes sent; 1.0 before the first call."""
        return self.bytes_before / self.bytes_sent if self.bytes_sent else 1.0

    def add(self, bytes_before: int, bytes_sent: int, *, seconds: float, finite: bool | Tensor, kernels: str) -> None:
        """Count one call.

        finite   whether the input was finite. For asynchronous kernels an int32 tensor on the device, 1 if it was not.
        """
        if isinstance(finite, Tensor):
            self._counter(finite.device).index_add_(0, _first(finite.device), finite)  # atomic: from any stream
        with _LOCK:
            self.calls += 1
            self.bytes_before += bytes_before
            self.bytes_sent += bytes_sent
            self.seconds += seconds
            self._nonfinite += finite is False
            self.kernels[kernels] = self.kernels.get(kernels, 0) + 1

    def _counter(self, device: torch.device) -> Tensor:
        with _LOCK:
            if device not in self._on_devices:
                self._on_devices[device] = _zero(device)
            return self._on_devices[device]


@lru_cache(maxsize=64)
def _first(device: torch.device) -> Tensor:
    return _zero(device)


def _zero(device: torch.device) -> Tensor:
    """Return a zero on the device. Wait until it is written, so that every stream can use it."""
    made = torch.zeros(1, dtype=torch.int32, device=device)
    if device.type == "cuda":
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(device))
        written.synchronize()
    return made
