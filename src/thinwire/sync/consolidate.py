"""The states of all ranks in one state dict, for programs that save what rank 0 returns.

Ranks send their states to one rank in turn, in pieces, so that no other rank holds more than its own. Tensors with the
same bytes as those of that rank are not sent: they are the same tensor in all states, which `torch.save` writes once.
All residuals are kept apart, though their sum is enough for another number of ranks: with the same number of ranks,
each continues with its own, to the same bits.
"""

import hashlib
import io
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..collectives.ask import Ask, ask_ranks
from ..collectives.groups import Group, place
from .ranked import fill, strip

_PIECE = 32 << 20
"""Bytes of one message."""


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
    """Return the states of ranks, in CPU memory, on rank `to`, and None on others. All ranks call this.

    sources   the ranks whose states are returned, in order; by default all.
    name      the name of the call, for errors.
    """
    rank, world_size = place(group)
    if type(to) is not int or not 0 <= to < world_size:
        raise ValueError(f"to={to!r}, expected a rank from 0 to {world_size - 1}")
    tensors: dict[str, Tensor] = {}
    rest = strip(state, "", tensors)
    mine: dict[str, Tensor] = {}
    gathered: dict[int, dict[str, Any]] = {}
    known: dict[str, tuple[Any, ...]] = {}
    if rank == to:
        mine = {path: tensor.detach().cpu() for path, tensor in tensors.items()}  # no copy if it is in CPU memory
        known = {path: _describe(tensor) for path, tensor in mine.items()}
        gathered[rank] = fill(rest, mine)

    def visit(source: int, ask: Ask) -> None:
        if sources is not None and source not in sources:
            return
        header = torch.load(io.BytesIO(bytes(ask(_request(b"header")).numpy())), weights_only=True)
        found, wanted = {}, {}
        for path, (dtype, shape, digest) in header["tensors"].items():
            if known.get(path) == (dtype, shape, digest):
                found[path] = mine[path]
            else:
                found[path] = wanted[path] = torch.empty(shape, dtype=dtype)
        request = _request(b"wanted" + bytes(path in wanted for path in found))
        for views in _pieces(wanted.values()):
            parts = ask(request).split([view.numel() for view in views])
            for view, part in zip(views, parts, strict=True):
                view.copy_(part)
            request = _request(b"next")
        gathered[source] = fill(header["rest"], found)

    answers = _answers(rest, tensors)
    next(answers)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    ask_ranks(
        group,
        device,
        to=to,
        visit=visit,
        answer=answers.send,
        requests=2 + nbytes // _PIECE,  # the header and the pieces; states of all ranks are about as large
        timeout=timeout,
        name=name,
    )
    wanted_ranks = range(world_size) if sources is None else sorted(sources)
    return [gathered[other] for other in wanted_ranks] if rank == to else None


def _answers(rest: Any, tensors: Mapping[str, Tensor]) -> Generator[Tensor, Tensor, None]:
    """Yield the answers to the requests of `visit`: a header, and then the wanted tensors in pieces."""
    yield torch.empty(0)
    buffer = io.BytesIO()
    torch.save({"rest": rest, "tensors": {path: _describe(tensor) for path, tensor in tensors.items()}}, buffer)
    request = yield torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    mask = request[len(b"wanted") :].tolist()
    for views in _pieces(tensor for tensor, is_wanted in zip(tensors.values(), mask, strict=True) if is_wanted):
        yield torch.cat([view.cpu() for view in views])


def _request(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _describe(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return dtype, shape and a digest of the bytes."""
    data = _bytes_of(tensor).cpu().numpy()
    return tensor.dtype, tuple(tensor.shape), hashlib.blake2b(data.data, digest_size=16).digest()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the bytes of all tensors, as lists of views with at most `_PIECE` bytes together."""
    piece: list[Tensor] = []
    room = _PIECE
    for tensor in tensors:
        left = _bytes_of(tensor)
        while left.numel():
            part, left = left[:room], left[room:]
            piece.append(part)
            room -= part.numel()
            if not room:
                yield piece
                piece, room = [], _PIECE
    if piece:
        yield piece
