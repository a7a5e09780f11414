"""Small messages between ranks: one in every step, and values that the ranks must agree on now and then.

A rank that receives a signal to stop cannot stop at once, because the other ranks would wait for it. So the message of
a step carries a flag, and the loss. It is sent before the exchange of the step and read after it, when it has arrived:
no rank waits for it, and all read the same. Where steps are local, messages are read some steps later.
"""

import pickle
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.collectives.cost import ring

_LENGTH_BYTES = 8
"""Bytes of the length that torch sends before a pickled object."""


class StepMessage(NamedTuple):
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
        self._under_way: deque[tuple[torch.Tensor, Any]] = deque()
        self._bytes_sent = 0

    def send_message(self, loss: float, stops: bool) -> None:
        """Start the all-reduce of this rank's loss and flag to stop."""
        values = torch.tensor([loss / self._size, float(stops)], dtype=torch.float64)
        self._under_way.append((values, dist.all_reduce(values, group=self._group, async_op=True)))
        self._bytes_sent += ring(values.nbytes, self._size)

    def read_messages(self, leave: int = 0) -> list[StepMessage]:
        """Wait for all messages but the last `leave`, and return them in the order in which they were sent."""
        found = []
        while len(self._under_way) > leave:
            values, work = self._under_way.popleft()
            work.wait()
            found.append(StepMessage(float(values[0]), bool(values[1] > 0)))
        return found

    def take_bytes_sent(self) -> int:
        """Return the bytes that this rank has sent since the last call."""
        taken, self._bytes_sent = self._bytes_sent, 0
        return taken

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank. The call is also a barrier."""
        values: list[Any] = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        # torch pads all values to the length of the longest, and sends the lengths first.
        self._bytes_sent += (self._size - 1) * (_LENGTH_BYTES + max(map(_pickled_bytes, values)))
        return values

    def total(self, values: list[float]) -> list[float]:
        """Return each value summed over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        self._bytes_sent += ring(tensor.nbytes, self._size)
        dist.all_reduce(tensor, group=self._group)
        return tensor.tolist()

    def from_first(self, value: Any) -> Any:
        """Return the value of rank 0."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        if dist.get_rank() == 0:
            sends = (self._size - 1).bit_length()  # gloo broadcasts along a binomial tree
            self._bytes_sent += sends * (_LENGTH_BYTES + _pickled_bytes(values[0]))
        return values[0]


def _pickled_bytes(value: Any) -> int:
    """Return the bytes of a value as torch sends it."""
    return len(pickle.dumps(value))
