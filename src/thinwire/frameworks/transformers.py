"""Hugging Face Transformers: a `Trainer` whose optimizer is `thinwire.AdamW`, on top of the Trainer's own DDP model.

What the Trainer does by itself would break it: it makes the optimizer before DDP, clips `.grad`, which has been sent by
then, and saves the optimizer of rank 0 alone. `TrainerMixin` changes these three, for any subclass of `Trainer`:

    class MyTrainer(TrainerMixin, SFTTrainer): ...

This module needs the package `transformers`, which thinwire does not install.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..optim import SGD, AdamW


class TrainerMixin:
    """Makes a `transformers.Trainer` train with `thinwire.AdamW`; stands before it in the list of base classes.

    Learning rate, betas, epsilon and weight decay are those of the TrainingArguments. Their max_grad_norm becomes that
    of thinwire, which clips before it sends; the Trainer's own clipping is off, and the norm that it logs is that of
    this rank's gradient. Other options of `thinwire.AdamW`, or `thinwire.SGD`:

        Trainer(..., optimizer_cls_and_kwargs=(thinwire.AdamW, {"compressor": "topk:ratio=1/64,bits=2"}))
    """

    args: Any
    accelerator: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: Any

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the model DDP, as the Trainer would do next, and return its optimizer."""
        if self.optimizer is None:
            self._check_arguments()
            if self.accelerator.distributed_type != DistributedType.NO:  # also one process of torchrun becomes DDP
                self.model_wrapped = self.accelerator.prepare_model(self.model)
                inner = getattr(self.model_wrapped, "_orig_mod", self.model_wrapped)  # of torch.compile's wrapper
                if self.accelerator.num_processes > 1 and not isinstance(inner, DistributedDataParallel):
                    raise ValueError(f"the model became a {type(inner).__name__}, expected DistributedDataParallel")
            self.optimizer = self._make()
            self.accelerator.clip_grad_norm_ = self._norm
        elif not isinstance(_inner(self.optimizer), AdamW | SGD):
            raise ValueError(
                f"optimizers= with a {type(self.optimizer).__name__}, expected none: options of thinwire.AdamW go into "
                "optimizer_cls_and_kwargs="
            )
        return self.optimizer

    def _check_arguments(self) -> None:
        """Raise ValueError for arguments that choose another optimizer, since this one is thinwire's, or no DDP."""
        for name in ("fsdp", "deepspeed"):
            if getattr(self, f"is_{name}_enabled", False):
                raise ValueError(
                    f"{name} in the TrainingArguments or in Accelerate's configuration, expected none: this Trainer "
                    "exchanges by DistributedDataParallel"
                )
        named = str(getattr(self.args.optim, "value", self.args.optim))
        if named not in ("adamw_torch", "adamw_torch_fused") or self.args.optim_args:
            raise ValueError(
                f"TrainingArguments(optim={named!r}, optim_args={self.args.optim_args!r}), expected neither: this "
                "Trainer uses thinwire.AdamW; options go into optimizer_cls_and_kwargs="
            )
        if self.args.auto_find_batch_size:
            raise ValueError("TrainingArguments(auto_find_batch_size=True), expected False: it makes DDP anew")
        kind = (self.optimizer_cls_and_kwargs or (AdamW,))[0]
        if kind not in (AdamW, SGD):
            raise ValueError(f"optimizer_cls_and_kwargs with {kind!r}, expected thinwire.AdamW or thinwire.SGD")

    def _make(self) -> Any:
        kind, given = self.optimizer_cls_and_kwargs or (AdamW, {})
        args = self.args
        options = {"lr": args.learning_rate, "grad_scaler": self.accelerator.scaler}
        if args.max_grad_norm:
            options["max_grad_norm"] = args.max_grad_norm
        if kind is AdamW:
            options |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        decays = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [pair for pair in named if pair[0] in decays], "weight_decay": args.weight_decay},
            {"params": [pair for pair in named if pair[0] not in decays], "weight_decay": 0.0},
        ]
        return kind([group for group in groups if group["params"]], **{**options, **given})

    def _norm(self, parameters: Iterable[Tensor], *_: Any, **__: Any) -> Tensor:
        """Return the norm of this rank's gradient, which the Trainer logs, and leave the gradient as it is."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        scaler = self.accelerator.scaler
        return norm if scaler is None else norm / scaler.get_scale()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the states of all ranks; with `save_on_each_node`, on one node after the other. All ranks call this."""
        ranks = [0]
        if self.args.save_on_each_node and self.args.world_size > 1:
            saving: list[Any] = [None] * self.args.world_size
            dist.all_gather_object(saving, bool(self.args.should_save))
            ranks = [rank for rank, saves in enumerate(saving) if saves]
        for rank in ranks:
            _inner(self.optimizer).consolidate_state_dict(to=rank)
            if rank == self.args.process_index:
                super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both from a checkpoint that has them, into CPU memory: the states of all ranks may not fit on a GPU."""
        paths = [Path(checkpoint or "", name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
        if checkpoint is not None and all(path.is_file() for path in paths):
            for path, each in zip(paths, (self.optimizer, self.lr_scheduler), strict=True):
                each.load_state_dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with `thinwire.AdamW`: see `TrainerMixin`."""


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)
