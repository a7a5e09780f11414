"""The training by Accelerate.    accelerate launch --multi_gpu --num_processes 2 with_accelerate.py FOLDER STEPS"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

import thinwire
from support.frameworks.task import BATCH, OPTIONS, Net, Samples, batches, save, write


def prepare(accelerator: Accelerator) -> tuple[Any, Any]:
    ddp = accelerator.prepare(Net())
    optimizer = accelerator.prepare(thinwire.AdamW(ddp, **OPTIONS))
    accelerator.register_save_state_pre_hook(lambda *_: optimizer.optimizer.consolidate_state_dict())
    return ddp, optimizer


def train(folder: Path, steps: int, resume: bool) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    ddp, optimizer = prepare(accelerator)
    loader = accelerator.prepare(DataLoader(Samples(steps, 2), batch_size=BATCH))
    first = 0
    if resume:
        first = steps // 2
        accelerator.load_state(folder / str(first))
        loader = accelerator.skip_first_batches(loader, first)
    for step, batch in enumerate(loader, first + 1):
        optimizer.zero_grad()
        accelerator.backward(ddp(**batch)["loss"])
        optimizer.step()
        if step in (steps // 2, steps):
            accelerator.save_state(folder / str(step))
    save(folder, "whole-resumed" if resume else "whole", ddp)
    accelerator.free_memory()
    sent = optimizer.optimizer.sync.stats.bytes_sent
    return {"bytes": sent}


def accumulate(folder: Path) -> dict[str, Any]:
    AcceleratorState._reset_state()  # which has the precision of the process
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    ddp, optimizer = prepare(accelerator)
    for batch in batches(0, 20):
        with accelerator.accumulate(ddp):
            accelerator.backward(ddp(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    save(folder, "accumulated", ddp)
    return {"accumulated_steps": optimizer.optimizer.sync.steps}


def clip() -> dict[str, Any]:
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    ddp, optimizer = prepare(accelerator)
    for batch in batches(0, 1):
        accelerator.backward(ddp(**batch)["loss"])
        accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
        try:
            optimizer.step()
        except RuntimeError as error:
            return {"clipped": str(error)}
    return {}


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    result = train(folder, steps, resume=False)
    train(folder, steps, resume=True)
    write(folder, result | accumulate(folder) | clip())
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
