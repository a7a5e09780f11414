"""What a compressor has done so far."""

import os
import threading
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

# One lock for all: it is held for nanoseconds, and a lock inside would make compressors impossible to pickle.
_LOCK = threading.Lock()


def _renew_lock() -> None:
    """Another thread may have held it when the process was forked."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass
class Statistics:
    """Counters of one compressor object, safe to add to from several threads.

    >>> import torch, thinwire
    >>> c = thinwire.TopK(ratio="1/64", bits=2)
    >>> _ = c.compress(torch.randn(8192))
    >>> c.stats.calls, c.stats.bytes_before, c.stats.bytes_sent
    (1, 32768, 168)
    """

    calls: int = 0
    bytes_before: int = 0
    bytes_sent: int = 0
    """Bytes of the payloads made. A frame adds its header, a collective what its algorithm costs."""
    seconds: float = 0.0
    """Time inside `compress`. On an accelerator this is the time to launch it."""
    kernels: dict[str, int] = field(default_factory=dict)
    """Calls by backend."""
    _nonfinite: int = 0
    _on_devices: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @property
    def nonfinite(self) -> int:
        """Calls whose input held NaN or Inf. Devices count for themselves: reading it waits for them."""
        return self._nonfinite + sum(int(counter) for counter in list(self._on_devices.values()))

    @property
    def ratio(self) -> float:
        """How many times smaller the bytes became; 1.0 before the first call."""
        return self.bytes_before / self.bytes_sent if self.bytes_sent else 1.0

    def add(self, bytes_before: int, bytes_sent: int, seconds: float, finite: bool | Tensor, kernels: str) -> None:
        """finite: where only the device knows, an int32 there that is 1 if not."""
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
    """The index of a counter's only entry."""
    return _zero(device)


def _zero(device: torch.device) -> Tensor:
    """There for all streams: it is waited for, once for each compressor."""
    made = torch.zeros(1, dtype=torch.int32, device=device)
    if device.type == "cuda":
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(device))
        written.synchronize()
    return made
