"""The training by the Trainer of Transformers.    torchrun --nproc-per-node 2 with_transformers.py FOLDER STEPS"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import thinwire
from support.frameworks.task import BATCH, OPTIONS, Meter, Net, Samples, save, write
from thinwire.frameworks.transformers import Trainer


class InOrder(Trainer):
    """A Trainer that does not shuffle, to be compared with the other programs."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Metered(TrainerCallback):
    def __init__(self) -> None:
        self.meter = Meter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.meter.begin()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.meter.end()


def arguments(folder: Path, steps: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": steps,
            "per_device_train_batch_size": BATCH,
            "use_cpu": True,
            "learning_rate": OPTIONS["lr"],
            "weight_decay": OPTIONS["weight_decay"],
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": max(1, steps // 4),
            "ddp_find_unused_parameters": False,
            **more,
        }
    )


def make(args: TrainingArguments, model: nn.Module, data: Dataset[Any], **more: Any) -> Trainer:
    given = thinwire.AdamW, {"warmup_steps": OPTIONS["warmup_steps"]}
    return InOrder(model, args, train_dataset=data, optimizer_cls_and_kwargs=given, **more)


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
    trainer = make(arguments(folder, 40, **more), GPT2LMHeadModel(config), Text())
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    torch.save(trainer.model.state_dict(), folder / f"gpt2-{dist.get_rank()}.pt")
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    norms = [line["grad_norm"] for line in trainer.state.log_history if "loss" in line]
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
    made = []
    for resume in (False, True):
        args = arguments(folder, 20, max_grad_norm=1.0, save_strategy="steps", save_steps=10)
        trainer = make(args, Net(), Samples(20, 1))
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-10") if resume else None)
        made.append(trainer.model.state_dict())
    if dist.is_initialized():
        dist.destroy_process_group()
    print("same bits", all(torch.equal(made[0][name], made[1][name]) for name in made[0]))


def others(folder: Path) -> None:
    """Each rank as the first one of its node, which saves; and a compiled model. Both go on from a checkpoint."""
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    for name, more in {
        "each-node": {"save_on_each_node": True},
        "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    }.items():
        place = folder / (f"{name}-node{rank}" if name == "each-node" else name)
        for resume in (False, True):
            args = arguments(place, 20, save_strategy="steps", save_steps=10, **more)
            trainer = make(args, Net(), Samples(20, 2))
            trainer.train(resume_from_checkpoint=str(place / "checkpoint-10") if resume else None)
            save(folder, f"{name}{'-resumed' if resume else ''}", trainer.model)
    write(folder, {})
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for resume in (False, True):
        metered = Metered()
        args = arguments(folder, steps, save_strategy="steps", save_steps=steps // 2)
        trainer = make(args, Net(), Samples(steps, 2), callbacks=[metered])
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{steps // 2}") if resume else None)
        save(folder, "whole-resumed" if resume else "whole", trainer.model)
        if not resume:
            sent = trainer.optimizer.optimizer.sync.stats.bytes_sent
            result = {"bytes": sent, "interface_bytes": metered.meter.interface_bytes}
            result["loss"] = trainer.state.log_history[-2]["loss"]
    write(folder, result | gpt2(folder) | refused(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "others" in sys.argv:
        others(Path(sys.argv[1]))
    elif "alone" not in sys.argv:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        alone(Path(sys.argv[1]))
