"""Small things that ranks tell each other: a pulse in every step, and whatever they must agree on now and then.

A rank that is told to end by a signal cannot just stop, since the others would wait for it. In every step it says in
its pulse whether it was told so. A pulse is sent before the exchange of a step, and read after it, when it has surely
come: nobody waits for it, and all ranks read the same. It also carries the loss, so that its average costs nothing.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.collectives.cost import ring


class Pulse(NamedTuple):
    loss: float
    """The mean over ranks."""
    stops: bool
    """Some rank was told to end."""


class Control:
    """Of one rank: a gloo group of its own, whatever the tensors of the model go by."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._size = dist.get_world_size()
        self._values = torch.zeros(2, dtype=torch.float64)
        self._work: Any = None
        self.bytes_sent = 0

    def send_pulse(self, loss: float, stops: bool) -> None:
        self._values[0], self._values[1] = loss / self._size, float(stops)
        self._work = dist.all_reduce(self._values, group=self._group, async_op=True)
        self.bytes_sent += ring(self._values.nbytes, self._size)

    def read_pulse(self) -> Pulse:
        self._work.wait()
        return Pulse(float(self._values[0]), bool(self._values[1] > 0))

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; also a way to wait for all of them."""
        values: list[Any] = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def total(self, values: list[float]) -> list[float]:
        """The sums over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        self.bytes_sent += ring(tensor.nbytes, self._size)
        dist.all_reduce(tensor, group=self._group)
        return tensor.tolist()

    def from_first(self, value: Any) -> Any:
        """What rank 0 has."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]
