"""The files and the classes of objects that one bucket passes in a real step of `thinwire.AdamW`.

Two ranks train under DDP, over gloo, on the CPU. After a few steps everything that is made once has been made. Then one
step is traced, on the thread of the caller and on that of the wire: which files of thinwire run, and which of its
classes are instantiated.
"""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

LIBRARY = Path(thinwire.__file__).parent
ARITHMETIC = ("compressors", "kernels")
"""Rooms whose files are not counted: the arithmetic of a compressor."""
STEPS_BEFORE = 5


class BucketPath(NamedTuple):
    """What one bucket of one rank passes in one step."""

    files: tuple[str, ...]
    """Files of thinwire that run, without those of compressors and kernels."""
    classes: tuple[str, ...]
    """Classes of thinwire that are instantiated."""


class Tracer:
    """Records calls while it is active, on every thread that started after it was installed."""

    def __init__(self) -> None:
        self.is_active = False
        self.files: set[str] = set()
        self.classes: set[str] = set()
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_active or event != "call":
            return
        code = frame.f_code
        path = Path(code.co_filename)
        if path.is_relative_to(LIBRARY):
            self.files.add(str(path.relative_to(LIBRARY)))
        if code.co_name in ("__init__", "__new__") and code.co_varnames:
            first = frame.f_locals.get(code.co_varnames[0])
            made = first if isinstance(first, type) else type(first)
            if made.__module__.startswith("thinwire."):
                self.classes.add(f"{made.__module__}.{made.__qualname__}")

    def remove(self) -> None:
        """Stop tracing on this thread and on new ones."""
        self.is_active = False
        sys.setprofile(None)
        threading.setprofile(None)


def traced_step(rank: int, world_size: int) -> BucketPath:
    """Train until all that is made once is made, then trace a step whose only bucket has one parameter."""
    tracer = Tracer()  # before the wire's thread starts
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    optimizer = thinwire.AdamW(model, compressor="topk:ratio=1/64,bits=2", warmup_steps=1, refresh_every=0)
    for step in range(STEPS_BEFORE + 1):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 256)).square().mean()
        tracer.is_active = step == STEPS_BEFORE
        loss.backward()
        optimizer.step()
    tracer.remove()
    files = sorted(file for file in tracer.files if Path(file).parts[0] not in ARITHMETIC)
    return BucketPath(tuple(files), tuple(sorted(tracer.classes)))
