"""Payloads that are damaged on their way, or before they are sent: the size is right, and what is in them is not."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from support.framing import write_positions
from thinwire.collectives.groups import Group
from thinwire.collectives.local import LocalGroup
from thinwire.collectives.transport.link import Buffers, GlooLink, Seen, Wait
from thinwire.kernels.layout import DenseLayout, Layout, QuantizeLayout, TopKLayout, TopKRecord
from thinwire.testing import Fault

Damage = Callable[[Tensor, Layout], None]
INFINITE, MARK = 0x7F80, 0x7FC0
"""bfloat16."""


def put(payload: Tensor, at: int, number: int, size: int = 2) -> None:
    payload[at : at + size] = torch.tensor(list(number.to_bytes(size, "little")), dtype=torch.uint8)


def tail(payload: Tensor, layout: Layout) -> tuple[Tensor, TopKRecord]:
    """The last record, which is shorter than the others: its code has room for positions outside."""
    return payload[-layout.tail.nbytes :], layout.tail


def infinite_scale(payload: Tensor, layout: Layout) -> None:
    put(payload, 0, INFINITE)


def marked_record(payload: Tensor, layout: Layout) -> None:
    """The second of several."""
    assert layout.rows > 1
    for at in range(0, layout.record.codes_at, 2):
        put(payload, layout.record.nbytes + at, MARK)


def marked_block(payload: Tensor, layout: Layout) -> None:
    put(payload, 2, MARK)


def outside(payload: Tensor, layout: Layout) -> None:
    """The last position, with the others in front."""
    last, record = tail(payload, layout)
    code = write_positions([*range(record.k - 1), record.n], record)
    last[record.low_at :] = torch.tensor(list(code), dtype=torch.uint8)


def one_bit_more(payload: Tensor, layout: Layout) -> None:
    """In the bitmap of the first record, the first bit that is not set."""
    bitmap = payload[layout.record.high_at : layout.record.nbytes]
    at = int((bitmap != 0xFF).nonzero()[0])
    bitmap[at] |= int(bitmap[at]) + 1


def one_bit_less(payload: Tensor, layout: Layout) -> None:
    bitmap = payload[layout.record.high_at : layout.record.nbytes]
    at = int(bitmap.nonzero()[0])
    bitmap[at] &= int(bitmap[at]) - 1


def padding(payload: Tensor, layout: Layout) -> None:
    """The highest bit behind the codes, the low bits or the bitmap: where there is one."""
    last, record = tail(payload, layout)
    fields = {
        record.low_at: record.k * record.bits,
        record.high_at: record.k * record.low_bits,
        record.nbytes: record.k + ((record.n - 1) >> record.low_bits),
    }
    end = next(end for end, bits in fields.items() if bits % 8)
    if end == record.nbytes:  # as many bits are set as before
        at = record.high_at + int(last[record.high_at :].nonzero()[0])
        last[at] &= int(last[at]) - 1
    last[end - 1] |= 0x80


def infinite_value(payload: Tensor, layout: Layout) -> None:
    payload.view(torch.float32)[layout.numel // 2] = -torch.inf


def no_value(payload: Tensor, layout: Layout) -> None:
    payload.view(torch.float32)[layout.numel // 2] = torch.nan


DAMAGES: dict[type[Layout], list[Damage]] = {
    TopKLayout: [infinite_scale, marked_record, outside, one_bit_more, one_bit_less, padding],
    QuantizeLayout: [infinite_scale, marked_block],
    DenseLayout: [infinite_value, no_value],
}
DAMAGES_OF_A_DENSE_SUM: list[Damage] = [no_value]
"""It may be infinite: finite numbers of ranks may overflow in it."""


def invert(payload: Tensor) -> None:
    """Invert every bit of a payload."""
    payload.bitwise_not_()


@dataclass(frozen=True)
class DamagedPayload(Fault):
    """One payload of the rank is changed: as many bytes as before, but others. For processes with gloo.

    Not every damage can be seen by the receiver: that of a value may be another value.

    damage   changes the payload, a uint8 tensor, in place.
    peer     rank that gets the damaged copy, as by a fault in transit; None: all get it, as by a fault in memory.
    nbytes   size of the payload to damage; None: the first one.
    """

    damage: Callable[[Tensor], object] = invert
    peer: int | None = None
    nbytes: int | None = None

    @contextmanager
    def strike(self, group: Group, parameters: list[Tensor]) -> Iterator[None]:
        """Damage the first such payload that this process sends over gloo."""
        if isinstance(group, LocalGroup):
            raise ValueError(f"{self} needs processes, because threads do not check payloads: use a RankPool")
        post: Callable[[GlooLink, Buffers, Buffers, int], Wait] = GlooLink.post
        hit = False

        def damage_and_post(link: GlooLink, sends: Buffers, receives: Buffers, tag: int) -> Wait:
            nonlocal hit
            if hit or not self._fitting(sends):
                return post(link, sends, receives, tag)
            hit = True
            wait = post(link, self._damaged(sends), receives, tag)
            return lambda *args: Seen(sends, wait(*args).received)  # the sender does not see what happens in transit

        with patch.object(GlooLink, "post", damage_and_post):
            yield
        if not hit:
            size = "" if self.nbytes is None else f" of {self.nbytes} bytes"
            raise ValueError(f"{self} did not happen: the rank sent no payload{size} in the block of inject()")

    def _fitting(self, sends: Buffers) -> dict[int, Tensor]:
        fits = {to: sent for to, sent in sends.items() if sent.numel() and self.nbytes in (None, sent.numel())}
        return fits if self.peer is None else {to: sent for to, sent in fits.items() if to == self.peer}

    def _damaged(self, sends: Buffers) -> Buffers:
        fits = self._fitting(sends)
        if self.peer is not None:
            fits = {to: sent.clone() for to, sent in fits.items()}
        for sent in {sent.data_ptr(): sent for sent in fits.values()}.values():  # one buffer may be for all
            self.damage(sent)
        return {**sends, **fits}


def damaged(damage: Damage, layout: Layout, peer: int | None) -> AbstractContextManager[None]:
    """Damage the next payload of this size that this rank sends; an error if there is none.

    peer   the copy for this peer alone, as a fault in transit; None: in the sender's memory, so for all peers.
    """
    return DamagedPayload(0, 0, partial(damage, layout=layout), peer, layout.nbytes).strike(None, [])
