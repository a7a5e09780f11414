"""The states of all ranks in one state dict, for programs that save what rank 0 returns.

Ranks stream their states to one rank in turn, in pieces, so that no other rank holds more than its own. A tensor with
the same bytes as that of the receiving rank becomes the same tensor, which `torch.save` writes once.
"""

import io
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives.groups import Group, place
from ..collectives.stream import stream
from ..collectives.transport.channel import Channel
from .ranked import fill, strip

_PIECE = 32 << 20  # bytes of one message
_NOTHING = torch.empty(0, dtype=torch.uint8)


def gather_states(
    state: Mapping[str, Any],
    *,
    group: Group,
    device: torch.device,
    to: int,
    timeout: float | None,
    sources: Collection[int] | None = None,
    name: str = "consolidate_state_dict",
) -> list[dict[str, Any]] | None:
    """Return the states of all ranks, or of `sources`, in CPU memory, on rank `to`; None on others. All ranks call."""
    rank, world_size = place(group)
    if type(to) is not int or not 0 <= to < world_size:
        raise ValueError(f"to={to!r}, expected a rank from 0 to {world_size - 1}")
    wanted = range(world_size) if sources is None else sorted(sources)
    tensors: dict[str, Tensor] = {}
    rest = strip(state, "", tensors)
    gathered: dict[int, dict[str, Any]] = {}
    mine: dict[str, Tensor] = {}
    if rank == to:
        mine = {path: tensor.detach().cpu() for path, tensor in tensors.items()}  # no copy if it is in CPU memory
        gathered[rank] = fill(rest, mine)

    def send() -> Iterator[Tensor]:
        if rank not in wanted:
            return
        buffer, kinds = io.BytesIO(), {path: (tensor.dtype, tuple(tensor.shape)) for path, tensor in tensors.items()}
        torch.save({"rest": rest, "tensors": kinds}, buffer)
        yield torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        for tensor in tensors.values():
            for piece in _pieces(tensor):
                yield piece.cpu()

    def receive(source: int, messages: Iterator[Tensor]) -> None:
        if source not in wanted and next(messages, None) is None:
            return
        header, found = torch.load(io.BytesIO(bytes(next(messages, _NOTHING).numpy())), weights_only=True), {}
        for path, (dtype, shape) in header["tensors"].items():
            tensor = torch.empty(shape, dtype=dtype)
            for piece in _pieces(tensor):
                message = next(messages, _NOTHING)
                if message.numel() != piece.numel():
                    raise ValueError(f"{path!r}: rank {source} sent {message.numel()} bytes, expected {piece.numel()}")
                piece.copy_(message)
            found[path] = mine[path] if path in mine and _is_same(mine[path], tensor) else tensor
        if next(messages, None) is not None:
            raise ValueError(f"rank {source} sent more than its {len(found)} tensors")
        gathered[source] = fill(header["rest"], found)

    stream(
        group,
        device,
        to=to,
        send=send,
        receive=receive,
        most=1 + sum(len(_pieces(tensor)) for tensor in tensors.values()),  # other ranks have about as many
        timeout=timeout,
        name=name,
    )
    return [gathered[other] for other in wanted] if rank == to else None


def _pieces(tensor: Tensor) -> list[Tensor]:
    return [piece for piece in _bytes_of(tensor).split(_PIECE) if piece.numel()]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes_of(a), _bytes_of(b))


class Saves:
    """Warns if rank 0 alone calls `state_dict()`, by the notice board of the group, though states differ between ranks.

    At the end of the step after a call, rank 0 sees whether its neighbour has called too: it would have by then.
    """

    def __init__(self) -> None:
        self._numbers: dict[Channel, int] = {}  # of this among a channel's synchronizers
        self._has_warned = False
        self.noted: tuple[Channel, str, int] | None = None  # since the last check: a key on the board, and steps

    def number(self, channels: Sequence[Channel]) -> None:
        """Number this synchronizer among those of its channels. All ranks call this in the same order."""
        for channel in channels:
            if channel not in self._numbers:
                self._numbers[channel] = next(channel.users)

    def note(self, steps: int) -> None:
        """Note on the board of a group that this rank has saved its state, after so many steps."""
        channel = next((each for each in self._numbers if each.size > 1), None)
        if channel is None or self._has_warned or self.noted is not None or not steps:
            return
        self.noted = channel, f"saved/{self._numbers[channel]}", steps
        channel.board.write(f"{self.noted[1]}/{channel.rank}", str(steps))

    def check(self) -> None:
        """Warn on rank 0, at the end of the step after a call, if its neighbour has not called; once."""
        assert self.noted is not None
        (channel, key, steps), self.noted = self.noted, None
        if channel.rank != 0:
            return
        theirs = channel.board.read(f"{key}/1")
        if channel.board.lost is None and (theirs is None or int(theirs) < steps):  # it may have called once more since
            self._has_warned = True
            warnings.warn(
                f"rank {channel.ranks[0]} called state_dict(), and rank {channel.ranks[1]} did not. Residuals and "
                "momentum differ between ranks: what one rank saves alone cannot be loaded by the others. Call "
                "consolidate_state_dict() on all ranks before, or save the state_dict() of every rank",
                stacklevel=3,
            )
