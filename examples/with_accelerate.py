"""Accelerate: the optimizer is made of the prepared model.

torchrun --nproc-per-node 2 examples/with_accelerate.py [FOLDER]    # or accelerate launch

With a FOLDER it writes a checkpoint there, and goes on from the one it finds.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire

EPOCHS = 4


def main(folder: Path | None) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs, teacher = torch.randn(6400, 256), nn.Linear(256, 8)
    data = DataLoader(TensorDataset(inputs, teacher(inputs).detach()), batch_size=64, shuffle=True)
    student = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))

    ddp, data = accelerator.prepare(student, data)
    # To clip, give max_grad_norm= here, and leave accelerator.clip_grad_norm_ out.
    optimizer = accelerator.prepare(thinwire.AdamW(ddp, lr=1e-3))
    # Accelerate saves the state of rank 0: let it have the residuals and the momentum of all ranks.
    accelerator.register_save_state_pre_hook(lambda *_: optimizer.optimizer.consolidate_state_dict())

    if folder is not None and folder.exists():
        accelerator.load_state(str(folder))
    for _ in range(EPOCHS):
        for batch, target in data:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(batch), target)
            accelerator.backward(loss)
            optimizer.step()
        sync = optimizer.optimizer.sync
        accelerator.print(f"step {sync.steps}: loss {loss.item():.4f}, reduction {sync.stats.reduction:.0f}x")
    if folder is not None:
        accelerator.save_state(str(folder))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
