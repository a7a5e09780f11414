"""Rounds in a group whose ranks come and go: receipts, decisions, and the common weights for newcomers.

docs/local-steps.md draws the protocol; `ElasticGroup` has its entries in the store.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from ..collectives import CollectiveError, PeerError, all_reduce_compressed
from ..collectives.elastic import MOST_ADMITTED, Change, ElasticGroup
from ..collectives.transport.errors import rank_list
from ..sync.consolidate import gather_states
from ..sync.synchronizer import Synchronizer

State = Mapping[str, Any]
_TRIES = 5  # of a newcomer


class Membership:
    """The part of `LocalSteps` that follows the members of an `ElasticGroup`."""

    def __init__(self, group: ElasticGroup) -> None:
        self.group = group
        self.is_newcomer = group.is_newcomer
        self._newcomers = group.wait_for_admission() if self.is_newcomer else []  # without the common weights yet

    def agree(self, error: CollectiveError | None) -> Change:
        """Agree with the other members on an exchange, which this rank has received, unless there was an error."""
        if error is None:
            try:
                left, joined = self._exchange_receipts()
            except CollectiveError as other:
                error = other
            else:
                return self.group.decide(left, joined)
        change = self.group.call_roll(error.ranks)
        if change.lost:
            warnings.warn(
                f"{rank_list(change.lost)} of {change.ranks_before} lost, and with it what was not sent; "
                f"{self.group.size} go on: {error}",
                stacklevel=5,
            )
        return change

    def _exchange_receipts(self) -> tuple[list[int], list[int]]:
        """Exchange receipts, and return the ranks that want to leave, and the newcomers to admit."""
        group = self.group
        leaves, *admitted = group.wishes()
        receipt = torch.zeros(group.size + MOST_ADMITTED, dtype=torch.float64)
        receipt[group.rank] = leaves
        receipt[group.size :] = torch.tensor(admitted)
        all_reduce_compressed(receipt, "none", group=group, algorithm="gather")
        flags, numbers = receipt[: group.size].tolist(), receipt[group.size :].tolist()
        left = [member for member, flag in zip(group.members, flags, strict=True) if flag]
        return left, [int(number) for number in numbers if number]

    def follow(self, change: Change, sync: Synchronizer) -> None:
        """Go on with the members of now. Newcomers answer a roll call first, since one of them may have died."""
        if self.group.has_left:
            return
        if change.joined:
            self._newcomers = change.joined
            again = self.group.call_roll()
            if again.lost:
                warnings.warn(f"{rank_list(again.lost)} lost while others join", stacklevel=5)
        if change.is_new:
            sync.follow_group(change.ranks_before)

    def hand_over(self, state: Callable[[], State], device: torch.device) -> None:
        """Send the common state to newcomers. If that fails, see in the next exchange who is left."""
        newcomers, self._newcomers = self._newcomers, []
        for number in newcomers:
            if number in self.group.members:
                with suppress(CollectiveError):
                    self._gather(state(), number, device)

    def take_over(self, state: Callable[[], State], device: torch.device, sync: Synchronizer) -> State:
        """Return the common state, as a newcomer. If another rank dies meanwhile, join once more, as another one."""
        for _ in range(_TRIES):
            newcomers, self._newcomers = self._newcomers, []
            if self.group.members[0] in newcomers:
                raise PeerError("all ranks that had the common weights are lost: start anew, from a checkpoint")
            try:
                found = [self._gather(state(), n, device) for n in newcomers if n in self.group.members]
                return next(states[0] for states in found if states is not None)
            except CollectiveError as error:
                failed = error
            self.group.ask_to_join()
            self._newcomers = self.group.wait_for_admission()
            sync.follow_group(1)
        raise failed

    def _gather(self, state: State, to: int, device: torch.device) -> list[dict[str, Any]] | None:
        return gather_states(
            state,
            group=self.group,
            device=device,
            to=self.group.members.index(to),
            timeout=self.group.timeout,
            sources=[0],
            name="hand over the common weights",
        )
