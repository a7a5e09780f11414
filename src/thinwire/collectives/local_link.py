"""Messages between threads of one process: a receiver copies straight out of its sender's buffer.

A message is posted in its receiver's box and found there by sender and tag. The sender then waits until everybody has
taken what it posted, so that nothing is copied twice and a buffer is free again when `exchange` returns, as with gloo.

On CUDA nobody waits for the device. The sender's stream records an event behind what wrote the buffer, and the
receiver's stream waits for it before it copies; the receiver records one behind its copy, and the sender's stream waits
for that. So the buffer, and memory that is freed and used again on the sender's stream, change after the copy only.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .link import Buffers, Link, LinkBroken, Seen


@dataclass
class Parcel:
    """One message under way."""

    buffer: Tensor
    filled: torch.cuda.Event | None
    """The buffer holds the message, for streams that wait for this."""
    copied: torch.cuda.Event | None = None
    taken: bool = False


class Box:
    """What was posted to one rank and not yet taken, and who waits for it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.parcels: dict[tuple[int, int], Parcel] = {}
        """By sender and tag."""


class Switchboard:
    """The boxes of all ranks, which the links of one connection share. Closed by any of them, it is for all."""

    def __init__(self, size: int) -> None:
        self.boxes = [Box() for _ in range(size)]
        self.closed_by: int | None = None

    def close(self, rank: int) -> None:
        if self.closed_by is None:
            self.closed_by = rank
        for box in self.boxes:
            with box.changed:
                box.parcels.clear()
                box.changed.notify_all()


class LocalLink(Link):
    """One rank's end of a switchboard."""

    ordered = False

    def __init__(self, board: Switchboard, rank: int) -> None:
        super().__init__(rank, len(board.boxes))
        self._board = board

    def exchange(
        self, sends: Buffers, receives: Buffers, tag: int, deadline: float, waits_for: Callable[[int], None]
    ) -> Seen:
        posted = self._post(sends, tag)
        # Each rank begins with its right neighbour, so that not all of them copy from the same rank at once.
        peers = sorted({*posted, *receives}, key=lambda peer: (peer - self.rank) % self.size)
        for peer in peers:
            if peer in receives and receives[peer].numel():
                waits_for(peer)
                self._take(peer, tag, receives[peer], deadline)
        for peer in peers:
            if peer in posted:
                waits_for(peer)
                self._until_taken(peer, posted[peer], deadline)
        return Seen(sends, receives)

    def close(self) -> None:
        self._board.close(self.rank)

    def _post(self, sends: Buffers, tag: int) -> dict[int, Parcel]:
        filled = None
        posted = {}
        for peer, buffer in sends.items():
            if buffer.numel():
                filled = filled or _event_on(buffer)
                posted[peer] = Parcel(buffer, filled)
        for peer, parcel in posted.items():
            box = self._board.boxes[peer]
            with box.changed:
                if self._board.closed_by is None:
                    box.parcels[self.rank, tag] = parcel
                    box.changed.notify_all()
        return posted

    def _take(self, peer: int, tag: int, into: Tensor, deadline: float) -> None:
        box, key = self._board.boxes[self.rank], (peer, tag)
        with box.changed:
            self._wait(box, lambda: key in box.parcels, peer, deadline)
            parcel = box.parcels.pop(key)
        if parcel.buffer.numel() != into.numel():
            raise LinkBroken(peer, False, f"{parcel.buffer.numel()} bytes came, expected {into.numel()}")
        if parcel.filled is not None:
            parcel.filled.wait(torch.cuda.current_stream(into.device))
        into.copy_(parcel.buffer, non_blocking=True)
        parcel.copied = _event_on(into)
        with box.changed:
            parcel.taken = True
            box.changed.notify_all()

    def _until_taken(self, peer: int, parcel: Parcel, deadline: float) -> None:
        box = self._board.boxes[peer]
        with box.changed:
            self._wait(box, lambda: parcel.taken, peer, deadline)
        if parcel.copied is not None:
            parcel.copied.wait(torch.cuda.current_stream(parcel.buffer.device))

    def _wait(self, box: Box, done: Callable[[], bool], peer: int, deadline: float) -> None:
        """With the box's lock held."""
        board = self._board
        box.changed.wait_for(lambda: done() or board.closed_by is not None, max(0.0, deadline - time.monotonic()))
        if done():
            return
        if board.closed_by is not None:
            raise LinkBroken(peer, False, f"rank {board.closed_by} closed the connection")
        raise LinkBroken(peer, True, "no message in time")


def _event_on(tensor: Tensor) -> torch.cuda.Event | None:
    """Behind everything that was queued so far; None where nothing is queued."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
