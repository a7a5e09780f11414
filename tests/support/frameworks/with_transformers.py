"""The training by the Trainer of Transformers.    torchrun --nproc-per-node 2 with_transformers.py FOLDER STEPS"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import thinwire
from support.frameworks.task import BATCH, OPTIONS, Net, Samples, save, write
from thinwire.frameworks.transformers import Trainer


class InOrder(Trainer):
    """A Trainer that does not shuffle, to be compared with the other programs."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def make(folder: Path, steps: int, model: nn.Module, data: Dataset[Any], callbacks: Any = None, **more: Any) -> Trainer:
    given = thinwire.AdamW, {"warmup_steps": OPTIONS["warmup_steps"]}
    args = arguments(folder, steps, **more)
    return InOrder(model, args, train_dataset=data, optimizer_cls_and_kwargs=given, callbacks=callbacks)


def arguments(folder: Path, steps: int, **more: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": BATCH, "use_cpu": True, "learning_rate": OPTIONS["lr"],
        "weight_decay": OPTIONS["weight_decay"], "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": max(1, steps // 4),
        "ddp_find_unused_parameters": False,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**options, **more})


def twice(folder: Path, steps: int, ranks: int, callbacks: Any = None, **more: Any) -> Iterator[Trainer]:
    """Train all steps; then from the checkpoint in their middle."""
    for resume in (None, str(folder / f"checkpoint-{steps // 2}")):
        more = {"save_strategy": "steps", "save_steps": steps // 2, **more}
        trainer = make(folder, steps, Net(), Samples(steps, ranks), callbacks, **more)
        trainer.train(resume_from_checkpoint=resume)
        yield trainer


class Text(Dataset[dict[str, Tensor]]):
    """Sentences of a small language: each number is followed by itself plus a constant."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index + torch.arange(16) * (1 + index % 3)) % 64
        return {"input_ids": ids, "labels": ids}


def gpt2(folder: Path) -> dict[str, Any]:
    """A GPT-2 with clipping, as TrainingArguments has it by default, accumulation and bfloat16."""
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    more: dict[str, Any] = {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2, "bf16": True}
    trainer = make(folder, 40, GPT2LMHeadModel(config), Text(), **more)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    torch.save(trainer.model.state_dict(), folder / f"gpt2-{dist.get_rank()}.pt")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    losses, norms = ([line[name] for line in lines] for name in ("loss", "grad_norm"))
    return {"gpt2": losses, "norms": norms, "gpt2_steps": optimizer.sync.steps, "max": optimizer.max_grad_norm}


REFUSED: dict[str, dict[str, Any]] = {
    "optimizers": {},
    "optim": {"optim": "sgd"},
    "optim of 8 bits": {"optim": "adamw_torch_8bit"},
    "optim_args": {"optim_args": "foreach=True"},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "fsdp": {},
    "deepspeed": {},
}


def refused(folder: Path) -> dict[str, Any]:
    """The messages of what this Trainer refuses, by argument; nothing was trained then."""
    messages = {}
    for name, more in REFUSED.items():
        net = Net()
        own = (torch.optim.SGD(net.parameters()), None) if name == "optimizers" else (None, None)
        trainer = Trainer(net, arguments(folder, 1, **more), train_dataset=Samples(1, 2), optimizers=own)
        try:
            if name in ("fsdp", "deepspeed"):  # Accelerate does without the first on a CPU, and has no second one here
                setattr(trainer, f"is_{name}_enabled", True)
                trainer.create_optimizer()
            else:
                trainer.train()
        except ValueError as error:
            messages[name] = str(error)
    return {"refused": messages}


def alone(folder: Path) -> None:
    """One process, with nobody to exchange with. Prints whether a resume has the same bits."""
    one, other = (trainer.model.state_dict() for trainer in twice(folder, 20, 1, max_grad_norm=1.0))
    if dist.is_initialized():
        dist.destroy_process_group()
    print("same bits", all(torch.equal(one[name], other[name]) for name in one))


def others(folder: Path) -> None:
    """Each rank as the first one of its node, which saves; and a compiled model. Both go on from a checkpoint."""
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    for name, place, more in (
        ("each-node", f"each-node-node{rank}", {"save_on_each_node": True}),
        ("compiled", "compiled", {"torch_compile": True, "torch_compile_backend": "eager"}),
    ):
        for trainer, end in zip(twice(folder / place, 20, 2, **more), ("", "-resumed"), strict=True):
            save(folder, f"{name}{end}", trainer.model)
    write(folder, {})


def main(folder: Path, steps: int) -> None:
    result: dict[str, Any] = {}
    for trainer, name in zip(twice(folder, steps, 2), ("whole", "whole-resumed"), strict=True):
        save(folder, name, trainer.model)
        if name == "whole":
            sent = trainer.optimizer.optimizer.sync.stats.bytes_sent
            result = {"bytes": sent}
    write(folder, result | gpt2(folder) | refused(folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "alone" in sys.argv:
        alone(Path(sys.argv[1]))
    else:
        others(Path(sys.argv[1])) if "others" in sys.argv else main(Path(sys.argv[1]), int(sys.argv[2]))
        dist.barrier()
        dist.destroy_process_group()
