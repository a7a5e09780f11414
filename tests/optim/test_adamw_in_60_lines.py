"""The teaching version of AdamW has the library's weights."""

import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

import thinwire
from support.loaded import run_script
from thinwire.testing import RankPool

EXAMPLE = Path(__file__).parents[2] / "examples" / "adamw_in_60_lines.py"
STEPS = 14  # at the 16th the library averages second moments, which the example leaves out


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("adamw_in_60_lines", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(rank: int, world_size: int) -> None:
    """Train by both, with the same gradients. All elements of tensors as small as these are sampled for c."""
    theirs = example()
    torch.manual_seed(0)
    start = [torch.randn(16, 16), torch.randn(8, 32)]
    ours = nn.ParameterList([nn.Parameter(tensor.clone()) for tensor in start])
    policy = thinwire.Policy("topk:ratio=8/256,bits=32,chunk=256", min_numel=0, warmup=[(theirs.WARMUP, "none")])
    optimizer = thinwire.AdamW(ours, lr=0.01, compressor=policy)
    state = [[p, *(torch.zeros_like(p) for _ in range(3)), torch.ones(1)] for p in (one.clone() for one in start)]
    generator = torch.Generator().manual_seed(1 + rank)
    for number in range(1, STEPS + 1):
        grads = [torch.randn(p.shape, generator=generator) + 0.3 for p in ours]
        for parameter, grad in zip(ours, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        theirs.step(number, tuple(grads), state, lr=0.01)
    assert 0.5 < min(optimizer.second_moment_scale.values()) < 1.0
    for row, parameter, (name, residual) in zip(state, ours, sorted(optimizer.sync.residuals.items()), strict=True):
        torch.testing.assert_close(row[0], parameter.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(row[3].view(-1), residual, rtol=1e-4, atol=1e-5, msg=name)


def test_example_has_the_weights_of_the_library(ranks: RankPool) -> None:
    ranks.run(compare, 2)


def test_example_learns_by_itself() -> None:
    lines = run_script(EXAMPLE).splitlines()
    assert len(lines) == 2, lines
    for line in lines:
        assert float(line.split("loss ")[1].split()[0]) < 0.2, line  # it begins with 1
