"""Ranks as threads: results by rank, and every way to fail reaches the test with its rank."""

import threading

import pytest
import torch

import thinwire
from thinwire.collectives import LocalGroup
from thinwire.testing import run_threads


def add_ranks(group: LocalGroup, start: int) -> int:
    total = torch.tensor([float(start + group.rank)])
    thinwire.all_reduce_compressed(total, "none", group=group)
    return int(total)


def test_results_by_rank() -> None:
    for turns in (False, True):
        assert run_threads(lambda group: group.rank, 3, turns=turns) == [0, 1, 2]
        assert run_threads(add_ranks, 3, 10, turns=turns) == [33, 33, 33]


def test_an_error_has_its_rank_and_the_others_do_not_wait() -> None:
    """They get a CollectiveError, which is not what the test is shown."""

    def fail(group: LocalGroup) -> None:
        if group.rank == 1:
            raise KeyError("the reason")
        add_ranks(group, 0)

    with pytest.raises(KeyError, match="the reason") as caught:
        run_threads(fail, 3)
    assert caught.value.__notes__ == ["On rank 1 of 3."]


def test_ranks_that_do_not_end_are_named_with_their_place() -> None:
    free = threading.Event()

    def hang(group: LocalGroup) -> None:
        if group.rank == 1:
            free.wait(60)

    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not end within 0.5 s") as caught:
        run_threads(hang, 2, timeout=0.5)
    free.set()
    assert "free.wait(60)" in str(caught.value)
    with pytest.raises((thinwire.PeerError, TimeoutError), match="rank"):  # for one that never calls
        run_threads(lambda group: None if group.rank else add_ranks(group, 0), 2, timeout=1.0)
