"""How ranks meet and talk: device, backend and store of their process group, and small messages between them.

A rank that receives a signal to stop cannot stop at once, because the other ranks would wait for it. So every step has
a message with a flag, and the loss. It is sent before the exchange of the step and read after it, when it has arrived:
no rank waits for it, and all read the same. Where steps are local, messages are read some steps later.
"""

import secrets
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from thinwire.tools.place import Place

_START = "thinwire/start"
_LATE = (
    "rank {} has not come within {:g} s; if nodes have joined or left, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where "
    "torchrun is started, on every node: it may have sent this rank to the store of another node"
)


def pick_device(name: str, local_rank: int) -> torch.device:
    """Return the device for a rank of this node; raise ValueError if a GPU is requested and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device here; use --device cpu, or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def pick_backend(device: torch.device, local_world_size: int) -> str:
    """Return the backend of the process group. NCCL needs a GPU for each rank; ranks that share a GPU use gloo."""
    if device.type == "cuda" and local_world_size <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def fresh_store(place: Place, seconds: float) -> Any:
    """Return a store in which nothing is from an earlier start of the ranks; raise RuntimeError if one does not come.

    torchrun's agent keeps its store when it restarts ranks (torch 2.13), and with it the addresses of ranks that ended:
    gloo reads them and cannot connect. Agents count restarts differently, so the count is no help. Instead rank 0 names
    each start, and a rank uses a name only when rank 0 has answered a token that the rank has just drawn.
    """
    store: Any = next(rendezvous("env://", place.rank, place.world_size, timeout=timedelta(seconds=seconds)))[0]
    name = name_start(store, place.world_size, seconds) if place.rank == 0 else join_start(store, place.rank, seconds)
    return PrefixStore(f"{_START}/{name}/store", store)


def name_start(store: Any, world_size: int, seconds: float) -> str:
    """Name this start, answer the token of every other rank, and return the name."""
    store.set_timeout(timedelta(seconds=seconds))
    name = secrets.token_hex(8)
    store.set(_START, name)
    for rank in range(1, world_size):
        try:
            token = store.get(f"{_START}/{name}/{rank}").decode()
        except DistStoreError:
            raise RuntimeError(_LATE.format(rank, seconds)) from None
        store.set(f"{_START}/{name}/{token}", "")
    return name


def join_start(store: Any, rank: int, seconds: float) -> str:
    """Return the name of this start: that under which rank 0 has answered the token of this rank."""
    store.set_timeout(timedelta(seconds=seconds))
    token, deadline = secrets.token_hex(8), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if store.check([_START]):
            name: str = store.get(_START).decode()
            store.set(f"{_START}/{name}/{rank}", token)
            if store.check([f"{_START}/{name}/{token}"]):
                return name
        time.sleep(0.05)
    raise RuntimeError(_LATE.format(0, seconds))


class Control:
    """Messages of one rank, over a gloo group of their own. They are not in the counts of bytes."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place, self.device = place, device
        self._group = dist.new_group(backend="gloo")
        self._under_way: deque[tuple[torch.Tensor, Any]] = deque()

    def send_message(self, loss: float, stops: bool) -> None:
        """Start the all-reduce of this rank's loss and flag to stop."""
        values = torch.tensor([loss / self.place.world_size, float(stops)], dtype=torch.float64)
        self._under_way.append((values, dist.all_reduce(values, group=self._group, async_op=True)))

    def read_messages(self, leave: int = 0) -> list[tuple[float, bool]]:
        """Wait for all messages but the last `leave`, and return the mean loss of each, and whether any rank stops."""
        found = []
        while len(self._under_way) > leave:
            values, work = self._under_way.popleft()
            work.wait()
            found.append((float(values[0]), bool(values[1] > 0)))
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank. The call is also a barrier."""
        values: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def total(self, values: list[float]) -> list[float]:
        """Return each value summed over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        return tensor.tolist()
