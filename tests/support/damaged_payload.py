"""A fault between processes: a payload that is damaged, in transit or in the memory of its sender."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from torch import Tensor

from thinwire.collectives.groups import Group
from thinwire.collectives.local import LocalGroup
from thinwire.collectives.transport.link import Buffers, GlooLink, Seen, Wait
from thinwire.testing import Fault


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
