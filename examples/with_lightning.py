"""Lightning: only the optimizer's class is another.

python examples/with_lightning.py [FOLDER]    # Lightning starts the second process itself

With a FOLDER it writes a checkpoint there, and goes on from the one it finds.
"""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire

EPOCHS = 4


class Student(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        return self.loss

    def configure_optimizers(self) -> Any:
        # DDP has these parameters by now. To clip, give max_grad_norm= here, and no gradient_clip_val to the Trainer.
        return thinwire.AdamW(self.parameters(), lr=1e-3)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            reduction = self.optimizers().sync.stats.reduction
            print(f"step {self.global_step}: loss {self.loss.item():.4f}, reduction {reduction:.0f}x")


def main(folder: Path | None) -> None:
    torch.manual_seed(0)
    inputs, teacher = torch.randn(6400, 256), nn.Linear(256, 8)
    data = DataLoader(TensorDataset(inputs, teacher(inputs).detach()), batch_size=64, shuffle=True)
    last = folder / "last.ckpt" if folder else None
    found = last if last is not None and last.exists() else None
    trainer = L.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_epochs=EPOCHS * (2 if found else 1), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Student(), data, ckpt_path=found)
    if last is not None:
        trainer.save_checkpoint(last)  # with the residuals and the momentum of all ranks


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
