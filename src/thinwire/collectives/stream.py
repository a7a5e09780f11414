"""Ranks that send messages of any size to one rank in turn: for what is too large to be on all ranks at once.

A message is its length in eight bytes, then its bytes. An empty message ends the turn of a rank, and an empty one in
return says that all have arrived. With two groups, a rank that is not connected with the receiving rank sends through
the rank that has its place in that node.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from .all_reduce import all_reduce_compressed
from .groups import Group, channels, place
from .transport.operation import Operation

_END = torch.empty(0, dtype=torch.uint8)


def stream(
    group: Group,
    device: torch.device,
    *,
    to: int,
    send: Callable[[], Iterable[Tensor]],
    receive: Callable[[int, Iterator[Tensor]], None],
    most: int,
    timeout: float | None,
    name: str,
) -> None:
    """Let all ranks of the group send messages to rank `to`, one rank after the other. All of them call this.

    send      called on the other ranks: returns at most `most` uint8 tensors in CPU memory, none of them empty.
    receive   on rank `to`: called with each other rank and an iterator of its messages.
    timeout   seconds for one message; by default that of the group.
    """
    ends, (rank, size) = channels(group, device), place(group)
    if device.type == "cuda":  # the wire reads what this thread has queued
        torch.cuda.current_stream(device).synchronize()
    if ends[-1].backend == "nccl":  # all ranks must take part in the first exchange of a group
        all_reduce_compressed(torch.zeros(1 << 16, device=device), "quantize:bits=8", group=group, timeout=timeout)
    # All of them are numbered now, so that after an error the next call has the same number on all ranks.
    turns = [(source, [Operation(channel, name) for channel in ends]) for source in range(size) if source != to]
    call = json.dumps({"call": name, "to": to})

    def take_turn(number: int, source: int, operations: list[Operation]) -> None:
        seconds = ends[0].timeout if timeout is None else timeout
        for operation in operations:
            operation.describe(call, None)
            # Each exchange before this turn may take so long. If one fails, those who take part report it before that.
            operation.limit(seconds * (1 + 2 * number * (2 + most)))
            operation.start()
            operation.limit(seconds)
        up, down, is_between = _lines(operations, to=to, source=source, device=device)
        if rank == to:
            receive(source, down.messages())
            down.send(_END)
        elif rank == source or is_between:
            for message in send() if rank == source else down.messages():
                up.send(message)
            up.send(_END)
            list(up.messages())  # only its end, which says that the receiver has everything
            if rank != source:
                down.send(_END)

    def take_turns() -> None:
        for number, (source, operations) in enumerate(turns):
            try:
                take_turn(number, source, operations)
            except BaseException as error:
                for operation in operations:
                    operation.give_up(error)
                raise

    task = _Task(take_turns)
    if ends[-1].wire is None:
        task.post()
    else:
        ends[-1].wire.submit(task)
    task.result()


class _Line(NamedTuple):
    """The connection to one peer in one turn: gloo sends from CPU memory, NCCL from the device."""

    operation: Operation
    peer: int
    device: torch.device

    def send(self, message: Tensor) -> None:
        self._exchange({self.peer: torch.tensor([message.numel()]).view(torch.uint8).to(self.device)}, {})
        if message.numel():
            self._exchange({self.peer: message.to(self.device)}, {})

    def messages(self) -> Iterator[Tensor]:
        while length := int(self._receive(8).view(torch.int64)):
            yield self._receive(length)

    def _receive(self, nbytes: int) -> Tensor:
        part = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._exchange({}, {self.peer: part})
        return part.cpu()

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        self.operation.collect(self.operation.post(sends, receives))
        self.operation.restart()


class _Task(Future[None]):
    """What the wire does in one piece, when it is posted."""

    encoded, waits_for_all, has_two_rounds = True, True, False

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def post(self) -> bool:
        try:
            self.set_result(self._work())
        except BaseException as error:
            self.set_exception(error)
        return False

    def collect(self) -> bool:
        return False  # `post` has done everything


def _lines(operations: list[Operation], *, to: int, source: int, device: torch.device) -> tuple[_Line, _Line, bool]:
    """Return the lines toward ranks `to` and `source`, and whether this rank is between: in the node of the first."""
    *inside, last = operations
    staged = device if last.channel.backend == "nccl" else torch.device("cpu")
    if not inside:
        return _Line(last, to, staged), _Line(last, source, staged), False
    (to_node, to_place), (node, place_) = (divmod(rank, inside[0].channel.size) for rank in (to, source))
    in_node, in_place = last.channel.rank == to_node, inside[0].channel.rank == place_
    up = _Line(inside[0], to_place, staged) if in_node else _Line(last, to_node, staged)
    down = _Line(last, node, staged) if in_place else _Line(inside[0], place_, staged)
    return up, down, in_node and in_place
