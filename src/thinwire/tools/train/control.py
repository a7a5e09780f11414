"""Small messages between ranks: a pulse in every step, and values that the ranks must agree on now and then.

A rank that receives a signal to stop cannot stop at once, because the other ranks would wait for it. Instead, its pulse
carries a flag. A pulse is sent before the exchange of a step and read after it, when it has arrived. So no rank waits
for it, and all ranks read the same values. It also carries the loss, so that the mean over ranks costs no further
message.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.collectives.cost import ring


class Pulse(NamedTuple):
    """The loss and the flag to stop, combined over ranks."""

    loss: float
    """Mean of the loss over ranks."""
    stops: bool
    """Whether any rank received a signal to stop."""


class Control:
    """Messages of one rank, over a gloo group of their own, whatever the backend of the model's tensors is."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._size = dist.get_world_size()
        self._values = torch.zeros(2, dtype=torch.float64)
        self._work: Any = None
        self.bytes_sent = 0

    def send_pulse(self, loss: float, stops: bool) -> None:
        """Start the all-reduce of this rank's loss and flag to stop."""
        self._values[0], self._values[1] = loss / self._size, float(stops)
        self._work = dist.all_reduce(self._values, group=self._group, async_op=True)
        self.bytes_sent += ring(self._values.nbytes, self._size)

    def read_pulse(self) -> Pulse:
        """Wait for the all-reduce of the pulse and return its result."""
        self._work.wait()
        return Pulse(float(self._values[0]), bool(self._values[1] > 0))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank. The call is also a barrier."""
        values: list[Any] = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def total(self, values: list[float]) -> list[float]:
        """Return each value summed over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        self.bytes_sent += ring(tensor.nbytes, self._size)
        dist.all_reduce(tensor, group=self._group)
        return tensor.tolist()

    def from_first(self, value: Any) -> Any:
        """Return the value of rank 0."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]
