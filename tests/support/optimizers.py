"""Optimizers of thinwire as most tests make them."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import SEVERAL, TOPK, policy

ADAMW = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
SGD = {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3}
OPTIONS = {"AdamW": ADAMW, "SGD": SGD}


def wrapped(module: nn.Module, ddp: bool) -> nn.Module:
    return DistributedDataParallel(module, **SEVERAL) if ddp else module


def make(kind: str, model: nn.Module, compressor: Any = None, **others: Any) -> Any:
    given = model if isinstance(model, DistributedDataParallel) else model.named_parameters()
    compressor = policy(TOPK) if compressor is None else compressor
    options = {"warmup_steps": 10 if kind == "AdamW" else 0, **OPTIONS[kind], **others}
    return getattr(thinwire, kind)(given, compressor=compressor, **options)


def make_scaler(scale: float = 1024.0, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **{"growth_interval": 1000, **options})
