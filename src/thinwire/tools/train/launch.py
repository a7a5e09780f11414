"""Starts the ranks on this machine, or joins the ranks that torchrun has started.

An error is shown once, with its rank: by the parent of the ranks, or under torchrun by the first rank that fails.
Errors that follow from it on other ranks, such as a closed connection, are not shown.
"""

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from thinwire.testing.pool import RankError, Workers, is_consequence
from thinwire.tools.links.relay import Relay
from thinwire.tools.place import Place
from thinwire.tools.record import cores
from thinwire.tools.units import parse_link

from .checks import check
from .config import Config
from .control import fresh_store, pick_backend, pick_device
from .image_files import download
from .metrics import say
from .rank import Rank, on_signals

LIMIT_SECONDS = 600.0  # Timeout of an exchange with a rank that does not answer. A rank that died is found at once
_CONSEQUENCE_SECONDS = 2.0  # Before a rank reports the failure of another rank, which can thus report it first
_BEFORE_GROUP_SECONDS = 10.0  # Before a rank other than local rank 0 reports an error from before there is a group


def launch(config: Config) -> int:
    """Train with ranks on this machine and return the exit code of `command.run`."""
    check(config)
    if config.download:
        download(config.data, config.data_dir)
    signals, links = _Signals(), None
    try:
        with ExitStack() as stack:
            stack.enter_context(on_signals(signals.handle))
            if config.link is not None:
                links = stack.enter_context(Relay(config.workers, *parse_link(config.link))).links
                say(f"links of {config.link} for each rank, through a relay")
                config = replace(config, device="cpu")
            threads = max(1, cores() // config.workers)
            workers = stack.enter_context(Workers(config.workers, threads, LIMIT_SECONDS, links))
            workers.form(config.workers, Rank, config)
            signals.pass_on = lambda: workers.signal(signal.SIGTERM)
            workers.ask("run", limit=None)
    except RankError as error:
        if signals.received is None or error.reason != "was killed by SIGTERM":  # before its handler was set
            return _report(error)
    return 0 if signals.received is None else 128 + signals.received


class _Signals:
    """Passes SIGINT and SIGTERM on to the ranks. Before they are ready, or at a second Ctrl-C, it ends the program."""

    received: int | None = None
    pass_on: Callable[[], None] | None = None

    def handle(self, number: int) -> None:
        again, self.received = self.received is not None, self.received or number
        if self.pass_on is None or (again and number == signal.SIGINT):
            raise SystemExit(128 + self.received)
        self.pass_on()


def join(config: Config, place: Place) -> int:
    """Train as one of the ranks that torchrun has started; return the exit code, or after an error end the process."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    try:
        if config.link is not None:
            raise ValueError("--link, or link in the config, under torchrun: expected thinwire train by itself")
        check(config)
        if config.download and place.local_rank == 0:
            download(config.data, config.data_dir)  # the others wait for this rank to join them
        backend = pick_backend(pick_device(config.device, place.local_rank), place.local_world_size)
        store, limit = fresh_store(place, LIMIT_SECONDS), timedelta(seconds=LIMIT_SECONDS)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    except (RuntimeError, ValueError, OSError) as error:
        _exit_before_group(error, place)
    store = dist.distributed_c10d._get_default_store()
    try:
        finished = Rank(rank=place.rank, world_size=place.world_size, config=config, place=place).run()
    except BaseException as error:
        _report_once(error, place, store)
        os._exit(2 if isinstance(error, ValueError | OSError) else 1)  # threads may wait for dead ranks
    dist.destroy_process_group()
    return 0 if finished else 128 + signal.SIGTERM


def _exit_before_group(error: Exception, place: Place) -> NoReturn:
    """Raise the error of a rank that has no group. All ranks may fail alike: local rank 0 alone reports at once."""
    if place.local_rank != 0:
        time.sleep(_BEFORE_GROUP_SECONDS)  # torchrun ends this rank meanwhile, if local rank 0 has failed too
    if isinstance(error, ValueError | OSError):
        raise error
    given, text = os.environ.get("GLOO_SOCKET_IFNAME"), str(error).split("\n")[0]
    if "connectFullMesh" in text:
        remote = re.search(r"remote=\[([^\]]+)\]", str(error))
        text = (
            f"the store is there, but no rank answers{f' at {remote[1]}' if remote else ''}. On every node set "
            f"GLOO_SOCKET_IFNAME, which is {given or 'not set'} here, to the interface of the network between nodes, "
            "and let TCP from the other nodes pass the firewall (docs/two-machines.md)"
        )
    elif "Unable to find address" in text and given:
        text = f"GLOO_SOCKET_IFNAME={given} is no interface with an address here; `ip -brief address` lists them"
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    raise ValueError(f"rank {place.rank} of {place.world_size} cannot join the others at {where}: {text}") from None


def _report(error: RankError) -> int:
    """Print the error of a rank and return the exit code: 2 if the user's input is its cause, else 1."""
    given = error.reason.startswith("raised ") and not error.trace
    if error.trace:
        print(error.trace, file=sys.stderr)
    _show(error.reason.partition(": ")[2] if given else str(error))
    return 2 if given else 1


def _report_once(error: BaseException, place: Place, store: Any) -> None:
    """Print the error of this rank, unless another rank has printed one."""
    if is_consequence(error):
        time.sleep(_CONSEQUENCE_SECONDS)
    with suppress(RuntimeError):  # the store ended with the rank that hosted it: then each rank prints its own
        if store.add("thinwire/failed", 1) > 1:
            return
    if not is_consequence(error) and not isinstance(error, ValueError | OSError):
        traceback.print_exception(error)
    _show(f"rank {place.rank} of {place.world_size}: {str(error) or repr(error)}")


def _show(text: str) -> None:
    say(f"thinwire train: error: {' '.join(text.split())}")
