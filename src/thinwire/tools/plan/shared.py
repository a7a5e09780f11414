"""The methods that a plan measures, as `python -m benchmarks` names them; their training loop; and a table."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

LOCAL = "local steps"
NO_COMMUNICATION = "no communication"
COMPRESSING = ("attach", "thinwire.AdamW", "thinwire.SGD")
"""Methods that are followed by the spec of a compressor."""


class Training(NamedTuple):
    """The module that a training loop calls, and its optimizer."""

    module: Any
    optimizer: Any


class Marks(NamedTuple):
    """Times of a step: its start, that of the backward pass and of the optimizer, and its end."""

    begin: float
    backward: float
    optimizer: float
    end: float


def begin(name: str, model: Any) -> Training:
    """Wrap a model in DDP to train it by the method of this name."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    import thinwire

    module = DistributedDataParallel(model, init_sync=False)
    kind, _, spec = name.partition(" ")
    if kind in ("thinwire.AdamW", "thinwire.SGD"):
        momentum = {"momentum": 0.9} if kind == "thinwire.SGD" else {}
        ours = getattr(thinwire, kind.removeprefix("thinwire."))
        return Training(module, ours(module, lr=1e-5, compressor=spec, warmup_steps=2, **momentum))

    def nothing(buffer: Any) -> Any:
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        future.set_result(buffer)
        return future

    hooks: dict[str, Any] = {
        NO_COMMUNICATION: lambda state, bucket: nothing(bucket.buffer()),
        "fp16 hook": fp16_compress_hook,
        "bf16": lambda state, bucket: bf16_compress_hook(None, bucket),  # type: ignore[arg-type]
    }
    if kind == "attach":
        thinwire.attach(module, spec)
    elif name in hooks:
        module.register_comm_hook(None, hooks[name])
    return Training(module, torch.optim.AdamW(module.parameters(), lr=1e-5))


def take_step(training: Training, loss: Callable[[Any], Any], clock: Callable[[], float] = time.perf_counter) -> Marks:
    """Take a training step, and return its times by this clock."""
    begin = clock()
    training.optimizer.zero_grad()
    found = loss(training.module)
    backward = clock()
    found.backward()
    optimizer = clock()
    training.optimizer.step()
    return Marks(begin=begin, backward=backward, optimizer=optimizer, end=clock())


def print_table(
    title: str, rows: Sequence[Mapping[str, str]], *, text: Collection[str] = (), spare: Sequence[str] = ()
) -> None:
    """Print a table to stdout. All rows have the same keys, which are the headers.

    text    headers of columns that are left-aligned. All others are right-aligned.
    spare   headers of columns that are left out, from the first on, until the table fits the terminal.
    """
    widths = {header: max(len(header), *(len(row[header]) for row in rows)) for header in rows[0]}
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    waiting = list(spare)
    while waiting and sum(widths.values()) + 2 * len(widths) > room:
        del widths[waiting.pop(0)]

    def line(cells: Mapping[str, str]) -> str:
        aligned = (f"{cells[name]:{'<' if name in text else '>'}{width}}" for name, width in widths.items())
        return "  ".join(aligned).rstrip()

    heading = line({header: header for header in widths})
    print("\n".join(["", title, heading, "-" * (sum(widths.values()) + 2 * len(widths) - 2), *map(line, rows)]))
    if len(waiting) < len(spare):
        print(f"{len(spare) - len(waiting)} columns do not fit this terminal.")
