"""One rank asks each other rank in turn, by messages of any size: for what is too large to be on all ranks at once.

A message is its length in eight bytes, then its bytes. An empty request ends the turn of a rank. With two groups, a
rank that shares neither node nor place in the node with the asking rank is asked through the rank that has its place in
the node of the asking rank.
"""

import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .all_reduce import all_reduce_compressed
from .groups import Group, channels, place
from .handle import copied
from .transport.channel import Channel
from .transport.operation import Operation

Ask = Callable[[Tensor], Tensor]
"""Function (request) that returns the answer. Both are uint8 tensors in CPU memory."""
_END = torch.empty(0, dtype=torch.uint8)
_EXCHANGES = 4
"""Exchanges for one request: the lengths and the bytes of the request and of its answer."""


def ask_ranks(
    group: Group,
    device: torch.device,
    *,
    to: int,
    visit: Callable[[int, Ask], None],
    answer: Ask,
    requests: int,
    timeout: float | None,
    name: str,
) -> None:
    """Let rank `to` ask the other ranks, one after the other. All ranks of the group call this.

    visit     on rank `to`: called with each other rank, and the function that asks it.
    answer    on the other ranks: returns the answer to a request that is not empty.
    requests  the most requests that a rank gets. The last rank waits for the turns of all others.
    timeout   seconds for one message; by default that of the group.
    name      the name of the call, for errors.

    Raises CollectiveError on all ranks if one of them fails, or was given another rank as `to`.
    """
    ends, (rank, size) = channels(group, device), place(group)
    if device.type == "cuda":  # the wire reads what this thread has queued
        torch.cuda.current_stream(device).synchronize()
    if ends[-1].backend == "nccl":  # all ranks must take part in the first exchange of a group
        all_reduce_compressed(torch.zeros(1 << 16, device=device), "quantize:bits=8", group=group, timeout=timeout)
    sources = [other for other in range(size) if other != to]
    # All of them are numbered now, so that after an error the next call has the same number on all ranks.
    turns = [_Turn([Operation(channel, name) for channel in ends], to, timeout) for _ in sources]
    for number, (source, turn) in enumerate(zip(sources, turns, strict=True)):
        turn.exchanges_before = 1 + number * _EXCHANGES * (requests + 1)
        up, down, is_between = _lines(turn, to=to, source=source, device=device)
        if rank == to:
            turn.talk = partial(_visit, down, source, visit)
        elif rank == source:
            turn.talk = partial(_answer, up, answer)
        elif is_between:
            turn.talk = partial(_answer, up, down.ask, down)
        turn.run(ends[-1])


class _Line(NamedTuple):
    """The connection to one peer in one turn."""

    operation: Operation
    peer: int
    device: torch.device
    """The device of what is sent: gloo sends from CPU memory, NCCL from the GPU."""

    def send(self, message: Tensor) -> None:
        """Send a message."""
        for part in (torch.tensor([message.numel()]).view(torch.uint8), message):
            self._exchange({self.peer: part.to(self.device)}, {})

    def receive(self) -> Tensor:
        """Return the next message of the peer."""
        length = torch.empty(8, dtype=torch.uint8, device=self.device)
        self._exchange({}, {self.peer: length})
        message = torch.empty(int(length.cpu().view(torch.int64)), dtype=torch.uint8, device=self.device)
        self._exchange({}, {self.peer: message})
        return message.cpu()

    def ask(self, request: Tensor) -> Tensor:
        """Send a request, which must not be empty, and return the answer."""
        self.send(request)
        return self.receive()

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        self.operation.collect(self.operation.post(sends, receives))
        self.operation.restart()


class _Turn:
    """What is exchanged with one rank, as a task of the wire, which does it in one piece."""

    encoded, waits_for_all, has_two_rounds = True, True, False

    def __init__(self, operations: list[Operation], to: int, timeout: float | None) -> None:
        self.operations, self._call = operations, {"call": operations[0].name, "to": to}
        self._timeout = timeout
        self.exchanges_before = 1
        """The most exchanges in the turns before this one, each of which may take as long as the timeout, and one."""
        self.talk: Callable[[], None] | None = None
        """Function that exchanges; None on ranks that only wait for their own turn."""
        self._done: Future[None] = Future()

    def run(self, channel: Channel) -> None:
        """Run by the wire of a channel if it has one, wait until everything is exchanged, and raise any error."""
        if channel.wire is None:
            self.post()
        else:
            channel.wire.submit(self)
        if (error := self._done.exception()) is not None:
            raise copied(error)

    def post(self) -> bool:
        """Exchange everything. Return False, because nothing is left to do."""
        try:
            for operation in self.operations:
                seconds = operation.channel.timeout if self._timeout is None else self._timeout
                operation.describe(self._call, json.dumps(self._call), None)
                # If one of them fails, those who take part report it to this rank, long before that.
                operation.limit(seconds * self.exchanges_before)
                operation.start()
                operation.limit(seconds)
            if self.talk is not None:
                self.talk()
            for operation in self.operations:
                operation.finish()
            self._done.set_result(None)
        except BaseException as error:
            try:
                for operation in self.operations:
                    operation.give_up(error)
            finally:
                self._done.set_exception(error)
        return False

    def collect(self) -> bool:
        """Return False: `post` has done everything."""
        return False


def _visit(line: _Line, source: int, visit: Callable[[int, Ask], None]) -> None:
    visit(source, line.ask)
    line.send(_END)


def _answer(line: _Line, answer: Ask, passed_on: _Line | None = None) -> None:
    while (request := line.receive()).numel():
        line.send(answer(request))
    if passed_on is not None:
        passed_on.send(_END)


def _lines(turn: _Turn, *, to: int, source: int, device: torch.device) -> tuple[_Line, _Line, bool]:
    """Return the lines of this rank toward rank `to` and toward the rank that is asked, and whether it is between them.

    The rank between them is in the node of rank `to`, in the place of the rank that is asked.
    """
    *inside, last = turn.operations
    staged = device if last.channel.backend == "nccl" else torch.device("cpu")
    if not inside:
        return _Line(last, to, staged), _Line(last, source, staged), False
    (to_node, to_place), (node, place_) = (divmod(rank, inside[0].channel.size) for rank in (to, source))
    in_node, in_place = last.channel.rank == to_node, inside[0].channel.rank == place_
    up = _Line(inside[0], to_place, staged) if in_node else _Line(last, to_node, staged)
    down = _Line(last, node, staged) if in_place else _Line(inside[0], place_, staged)
    return up, down, in_node and in_place
