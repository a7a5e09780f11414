"""The training by Lightning, which starts the second process itself.    python with_lightning.py FOLDER STEPS"""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

import thinwire
from support.frameworks.task import OPTIONS, Net, batches, loss_of, save, write
from thinwire.frameworks.lightning import Attach


class Module(L.LightningModule):
    """Half of the steps are an epoch, after which there is a checkpoint."""

    def __init__(self, steps: int, ours: bool = True) -> None:
        super().__init__()
        self.half, self.ours = steps // 2, ours
        self.layers = Net().layers  # with the names of `Net`, on which positions that ranks draw depend
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        first = self.trainer.current_epoch * self.half
        return batches(first, first + self.half)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = loss_of(self.layers, **batch)
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: Any, index: int) -> None:
        loss_of(self.layers, **batch)

    def configure_optimizers(self) -> Any:
        if self.ours:
            return thinwire.AdamW(self.parameters(), **OPTIONS)
        return torch.optim.AdamW(self.parameters(), lr=OPTIONS["lr"], weight_decay=0.0)


def trainer(**more: Any) -> L.Trainer:
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": "callbacks" in more} | more
    return L.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", use_distributed_sampler=False, enable_progress_bar=False,
        enable_model_summary=False, reload_dataloaders_every_n_epochs=1, **options,
    )  # fmt: skip


def twice(folder: Path, name: str, steps: int, ours: bool = True) -> tuple[Module, int]:
    """Train all steps; then from the checkpoint in their middle. Returns the first model, and the bytes it sent."""
    made: list[tuple[Module, int]] = []
    for ckpt in (None, folder / name / "epoch=0.ckpt"):
        module = Module(steps, ours)
        keep = ModelCheckpoint(dirpath=folder / name, filename="{epoch}", save_top_k=-1)
        callbacks = [keep] if ours else [keep, Attach("quantize:bits=1")]
        trainer(callbacks=callbacks).fit(module, ckpt_path=ckpt)
        save(folder, f"{name}{'-resumed' if ckpt else ''}", module)
        sync = module.optimizers().sync if ours else callbacks[1].sync
        made.append((module, sync.stats.bytes_sent))
    return made[0]


def fit_again(folder: Path) -> dict[str, Any]:
    """Fit an epoch of 10 steps, and then more: how many steps each synchronizer has taken. Needs `twice` before."""
    module, attached = Module(20, ours=False), Attach("quantize:bits=1")
    fitting, made = trainer(callbacks=[attached], max_epochs=1), []
    for epochs in (1, 2, 3):
        fitting.fit_loop.max_epochs = epochs
        fitting.fit(module)
        assert attached.sync is not None
        made.append(attached.sync.steps)
        if epochs == 2:
            fitting.test(module, batches(0, 1), ckpt_path=folder / "attached" / "epoch=0.ckpt", verbose=False)
    trainer(callbacks=[attached], max_epochs=1).fit(Module(20, ours=False))
    made.append(attached.sync.steps)
    ours = Module(20)
    fitting = trainer(max_epochs=1)
    for epochs in (1, 2):
        fitting.fit_loop.max_epochs = epochs
        fitting.fit(ours)
    return {"fitted_again": made, "ours_again": [ours.optimizers().sync.steps, len(ours.losses)]}


class Scaled(Module):
    """A module whose optimizer has the Trainer's GradScaler."""

    def configure_optimizers(self) -> Any:
        return thinwire.AdamW(self.parameters(), grad_scaler=self.trainer.precision_plugin.scaler, **OPTIONS)


def scaled(folder: Path) -> dict[str, Any]:
    """precision="16-mixed", for which Lightning takes bfloat16 on a CPU unless its plugin is given."""
    result: dict[str, Any] = {}
    for name, module in {"scaled": Scaled(20), "unscaled": Module(20)}.items():
        # The first scale is too large for float16, so that steps are skipped until it is halved often enough.
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))
        try:
            trainer(plugins=[plugin]).fit(module)
        except ValueError as error:
            result["without_scaler"] = str(error)
            continue
        save(folder, name, module)
        optimizer = module.optimizers()
        result |= {"scaled": module.losses, "scaled_steps": optimizer.sync.steps, "skipped": optimizer.skipped}
    return result


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    sent = twice(folder, "whole", steps)[1]
    result: dict[str, Any] = {"bytes": sent}
    result["attached_bytes"] = twice(folder, "attached", 20, ours=False)[1]
    result |= fit_again(folder)
    accumulated = Module(20)
    trainer(accumulate_grad_batches=2, precision="bf16-mixed").fit(accumulated)
    save(folder, "accumulated", accumulated)
    result |= {"accumulated_steps": accumulated.optimizers().sync.steps, "accumulated": accumulated.losses}
    result |= scaled(folder)
    try:
        trainer(gradient_clip_val=1.0).fit(Module(steps))
    except RuntimeError as error:
        result["clipped"] = str(error)
    write(folder, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
