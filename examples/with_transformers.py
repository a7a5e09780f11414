"""Transformers: a Trainer that trains with thinwire.AdamW.

torchrun --nproc-per-node 2 examples/with_transformers.py FOLDER

Run it again to go on from the last checkpoint in FOLDER.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from thinwire.frameworks.transformers import Trainer  # in place of transformers.Trainer

STEPS = 200


class Counting(Dataset[dict[str, Tensor]]):
    """Sentences of numbers that go up by one, two or three."""

    def __len__(self) -> int:
        return 64 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index + torch.arange(32) * (1 + index % 3)) % 128
        return {"input_ids": ids, "labels": ids}


class Shown(Trainer):
    def log(self, logs: dict[str, Any], *args: Any, **more: Any) -> None:
        if "loss" in logs and self.is_world_process_zero():
            reduction = self.optimizer.optimizer.sync.stats.reduction
            print(f"step {self.state.global_step}: loss {float(logs['loss']):.4f}, reduction {reduction:.0f}x")


def main(folder: str) -> None:
    found = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    steps = 2 * STEPS if found else STEPS
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=16, learning_rate=1e-3, save_steps=STEPS, logging_steps=50,
        use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Shown(GPT2LMHeadModel(config), args, train_dataset=Counting())
    trainer.train(resume_from_checkpoint=found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
