"""Trainings with `thinwire.LocalSteps` that tests compare: a small network on numbers drawn from (step, rank)."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thinwire


def network(with_buffers: bool = True) -> nn.Module:
    """A network with matrices that are compressed, small tensors, and buffers."""
    norm = nn.BatchNorm1d(96) if with_buffers else nn.LayerNorm(96)
    model = nn.Sequential(nn.Linear(64, 96), norm, nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(0)  # ranks may be threads, which share torch's own generator
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 64, generator=generator)
    return F.cross_entropy(model(x), x[:, :10].argmax(1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Trained(NamedTuple):
    weights: list[Tensor]
    buffers: list[Tensor]
    optimizer: Any
    saved: Any
    losses: list[float]


def train(
    group: Any,
    steps: int,
    options: dict[str, Any],
    *,
    state: Any = None,
    save_at: int | None = None,
    make: Callable[[nn.Module], Any] = adamw,
    before_step: Callable[[nn.Module, Any], None] | None = None,
    ends_together: bool = False,
) -> Trained:
    """Train until `steps` local steps were taken, from a state if one is given."""
    model = network()
    optimizer = thinwire.LocalSteps(make(model), group=group, model=model, **{"every": 8, **options})
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    saved, losses = None, []
    while optimizer.steps < steps:
        loss = loss_of(model, optimizer.steps, group.rank)
        optimizer.zero_grad()
        loss.backward()
        if before_step is not None:
            before_step(model, optimizer)
        optimizer.step()
        losses.append(loss.item())
        if optimizer.steps == save_at:
            saved = copy.deepcopy(optimizer.state_dict())
    if ends_together:
        optimizer.synchronize()
    buffers = copies(b for b in model.buffers() if b.is_floating_point())
    return Trained(copies(model.parameters()), buffers, optimizer, saved, losses)


def copies(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def after_local_step(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The weights that the local step gives, which is taken back."""
    inner = optimizer.optimizers[0]
    kept, state = copies(model.parameters()), copy.deepcopy(inner.state_dict())
    inner.step()
    made = copies(model.parameters())
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.copy_(before)
    inner.load_state_dict(state)
    return made
