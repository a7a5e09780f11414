"""What the tests of training share: small models, data that a rank and a step decide, and the bits of what came out."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from oracle import bytes_of
from thinwire.sync.checkpoint import residuals_of

TOPK = "topk:ratio=1/16,bits=4,chunk=512"
SPECS = {
    "topk": (TOPK, "gather"),
    "sharded": (TOPK, "sharded"),
    "quantize": ("quantize:bits=8", "auto"),
    "randomk": ("randomk:ratio=1/8", "auto"),
}
"""(spec, algorithm) by a name for test ids."""


def policy(spec: str, **options: Any) -> thinwire.Policy:
    """Weights of `make_net` are compressed, biases and norms go dense."""
    return thinwire.Policy(spec, **{"min_numel": 100, **options})


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Four weights, of 2048, 4096, 4096 and 512 elements; no ReLU, so that no gradient is 0 for long."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(),
            nn.Linear(64, 8),
        ).to(dtype)  # fmt: skip


SEVERAL = {"bucket_cap_mb": 0.006}
"""Makes DDP use two buckets and more for `make_net`, from its second iteration on."""
VIEWS = {**SEVERAL, "gradient_as_bucket_view": True}


def make_batch(rank: int, step: int, rows: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7919 * step + rank)
    given = torch.randn(rows, 32, generator=generator)
    return given.to(dtype), given[:, :8].to(dtype)


def loss_of(model: nn.Module, rank: int, step: int, rows: int = 8) -> Tensor:
    dtype = next(model.parameters()).dtype
    given, wanted = make_batch(rank, step, rows, dtype)
    return (model(given) - wanted).float().square().mean()


class Given(nn.Module):
    """A model whose gradients are what it is called with, to the last bit."""

    def __init__(self, sizes: Sequence[int] = (3000, 10, 700, 4096, 5), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        parts = [(weight * given).sum() for weight, given in zip(self.weights, gradients, strict=True)]
        return torch.stack(parts).sum()


def gradients(model: Given, rank: int, step: int, whole: bool = False) -> list[Tensor]:
    """Of another size on every rank; whole numbers on request, whose sums are exact."""
    generator = torch.Generator().manual_seed(104729 * step + rank)
    made = []
    for weight in model.weights:
        drawn = (1 + rank) * torch.randn(weight.numel(), generator=generator)
        made.append((8 * drawn).round().to(weight.dtype) if whole else drawn.to(weight.dtype))
    return made


def plain_module(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def weight_bits(model: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(parameter.detach()) for name, parameter in plain_module(model).named_parameters()}


def grad_bits(model: nn.Module) -> dict[str, bytes | None]:
    return {
        name: None if parameter.grad is None else bytes_of(parameter.grad)
        for name, parameter in plain_module(model).named_parameters()
    }


def sync_bits(sync: thinwire.Synchronizer) -> dict[str, bytes]:
    """All that a synchronizer owes: residuals by name, and what this rank owes as an owner."""
    state = sync.state_dict()
    owed = {name: bytes_of(residual) for name, residual in state["residuals"].items()}
    for owner in state["owners"]:
        owed[f"owner of {owner['run']}"] = bytes_of(owner["residual"])
    return owed


def optimizer_bits(optimizer: thinwire.SGD | thinwire.AdamW) -> dict[str, bytes]:
    """Weights, moments and what is owed."""
    found = {f"sync {name}": bits for name, bits in sync_bits(optimizer.sync).items()}
    state = optimizer.state_dict()
    for number, kept in state["state"].items():
        found |= {f"{kind} {number}": bytes_of(tensor) for kind, tensor in kept.items() if kind != "step"}
        found[f"step {number}"] = str(float(kept["step"])).encode()
    for name, parameter in optimizer.named_parameters():
        found[f"weight {name}"] = bytes_of(parameter.detach())
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names whose values differ; for messages that can be read."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    assert not differing(one, other), f"{what}: {differing(one, other)} differ"


def owed(sync: thinwire.Synchronizer) -> dict[str, Tensor]:
    """What this rank has taken in and not sent on, in units of the sum over ranks; parts of owners included."""
    return {name: residual.double() for name, residual in residuals_of(sync.state_dict()).items()}


def average(tensor: Tensor) -> Tensor:
    """Over ranks, by torch."""
    total = tensor.double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def average_owed(sync: thinwire.Synchronizer) -> dict[str, Tensor]:
    return {name: average(residual) for name, residual in sorted(owed(sync).items())}


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def attached(
    module: nn.Module, compressor: Any, ddp: bool, options: Mapping[str, Any] | None = None, **others: Any
) -> tuple[nn.Module, thinwire.Synchronizer, Callable[[], None]]:
    """(what to call, its synchronizer, what to call after backward): with DDP or by a plain loop."""
    if ddp:
        model = DistributedDataParallel(module, **(options or {}))
        return model, thinwire.attach(model, compressor, **others), lambda: None
    sync = thinwire.Synchronizer(compressor, **others)
    return module, sync, lambda: sync.all_reduce_gradients(module.named_parameters())


def identical(found: Iterable[Any]) -> bool:
    first, *others = found
    return all(other == first for other in others)


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> Iterator[None]:
    """As pytest.raises, inside a rank: the message must have all the words."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in the message: {error}") from error
    else:
        raise AssertionError(f"nothing was raised, expected {kind} with {words}")
