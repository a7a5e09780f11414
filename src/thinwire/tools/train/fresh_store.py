"""A store for each start of the ranks, also where torchrun hands the same store to ranks that it has restarted.

torchrun's agent keeps its store when it restarts ranks (torch 2.13), and with it the addresses of ranks that ended:
gloo reads them and cannot connect. Agents count restarts differently, so the count is no help. Instead rank 0 names
each start, and a rank uses a name only when rank 0 has answered a token that the rank has just drawn.
"""

import secrets
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from .place import Place

_START = "thinwire/start"
_POLL_SECONDS = 0.05


def fresh_store(place: Place, seconds: float) -> Any:
    """Return a store in which nothing is from an earlier start of the ranks. All ranks call it.

    Raises RuntimeError if a rank that this one waits for has not come within `seconds`.
    """
    store: Any = next(rendezvous("env://", place.rank, place.world_size, timeout=timedelta(seconds=seconds)))[0]
    store.set_timeout(timedelta(seconds=seconds))
    name = name_start(store, place.world_size, seconds) if place.rank == 0 else join_start(store, place.rank, seconds)
    return PrefixStore(f"{_START}/{name}/store", store)


def name_start(store: Any, world_size: int, seconds: float) -> str:
    """Name this start, answer the token of every other rank, and return the name."""
    name, started = secrets.token_hex(8), time.monotonic()
    store.set(_START, name)
    for rank in range(1, world_size):
        token = _read(store, f"{_START}/{name}/{rank}", rank, started, seconds)
        store.set(f"{_START}/{name}/{token}", "")
    return name


def join_start(store: Any, rank: int, seconds: float) -> str:
    """Return the name of this start: that under which rank 0 has answered the token of this rank."""
    token, started, written = secrets.token_hex(8), time.monotonic(), None
    while True:
        name = _read(store, _START, 0, started, seconds)
        if name != written:  # another one than that of an earlier start, which nobody answers
            store.set(f"{_START}/{name}/{rank}", token)
            written = name
        if store.check([f"{_START}/{name}/{token}"]):
            return name
        _pause(0, started, seconds)


def _read(store: Any, key: str, rank: int, started: float, seconds: float) -> str:
    """Return the value of a key once a rank has set it."""
    while not store.check([key]):
        _pause(rank, started, seconds)
    value: bytes = store.get(key)
    return value.decode()


def _pause(rank: int, started: float, seconds: float) -> None:
    """Wait a moment for a rank; raise RuntimeError if it has not come within `seconds`."""
    if time.monotonic() > started + seconds:
        raise RuntimeError(
            f"rank {rank} has not come within {seconds:g} s; if nodes have joined or left, set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started, on every node: it may have sent this rank "
            "to the store of another node"
        )
    time.sleep(_POLL_SECONDS)
