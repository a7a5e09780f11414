"""What the tests of training share: small models, data that a rank and a step decide, and the bits of what came out."""

import contextlib
import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.oracle import bytes_of
from thinwire import Collective
from thinwire.collectives import LocalGroup
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
    """Weights of `make_net` are compressed, biases and norms are sent dense."""
    return thinwire.Policy(spec, **{"min_numel": 100, **options})


_SEEDED = threading.Lock()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from this seed and leave the generator as it was. Ranks that are threads share it, so one at a time."""
    with _SEEDED, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Four weights, of 2048, 4096, 4096 and 512 elements; no ReLU, so that no gradient is 0 for long."""
    with seeded(seed):
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


def take(optimizer: Any, loss: Tensor) -> None:
    """Take a whole step, by this loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def averaged(sync: thinwire.Synchronizer, **gradients: Tensor) -> dict[str, Tensor]:
    """Send these gradients, and return what came back."""
    named = {name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in gradients.items()}
    for name, parameter in named.items():
        parameter.grad = gradients[name].clone()
    sync.all_reduce_gradients(named.items())
    return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}


def train(model: nn.Module, optimizer: Any, rank: int, first: int, last: int) -> list[float]:
    """The steps from `first` to `last` - 1, as an ordinary loop takes them; their losses."""
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


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
    """All residuals of a synchronizer: by name, and those of this rank as an owner."""
    state = sync.state_dict()
    residuals = {name: bytes_of(residual) for name, residual in state["residuals"].items()}
    for owner in state["owners"]:
        residuals[f"owner of {owner['run']}"] = bytes_of(owner["residual"])
    return residuals


def optimizer_bits(optimizer: thinwire.SGD | thinwire.AdamW) -> dict[str, bytes]:
    """Weights, moments and residuals."""
    found = {f"sync {name}": bits for name, bits in sync_bits(optimizer.sync).items()}
    state = optimizer.state_dict()
    for number, kept in state["state"].items():
        found |= {f"{kind} {number}": bytes_of(tensor) for kind, tensor in kept.items() if kind != "step"}
        found[f"step {number}"] = str(float(kept["step"])).encode()
    for name, parameter in optimizer.named_parameters():
        found[f"weight {name}"] = bytes_of(parameter.detach())
    return found


def written(state: Any) -> bytes:
    """What torch.save writes of it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names whose values differ; for messages that can be read."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    assert not differing(one, other), f"{what}: {differing(one, other)} differ"


def residuals(sync: thinwire.Synchronizer) -> dict[str, Tensor]:
    """What this rank has taken in and not sent on, in units of the sum over ranks; parts of owners included."""
    return {name: residual.double() for name, residual in residuals_of(sync.state_dict()).items()}


def average(tensor: Tensor, group: LocalGroup | None = None) -> Tensor:
    """Over ranks: by torch between processes, by a dense sum between threads."""
    total = tensor.double().clone()
    if group is not None:
        thinwire.all_reduce_compressed(total, "none", group=group)
        return total / group.size
    dist.all_reduce(total)
    return total / dist.get_world_size()


def average_residuals(sync: thinwire.Synchronizer, group: LocalGroup | None = None) -> dict[str, Tensor]:
    return {name: average(residual, group) for name, residual in sorted(residuals(sync).items())}


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


def force(sync: thinwire.Synchronizer, best: int) -> None:
    """Let the compressor of this number be the quickest, by what ranks say that they have measured."""
    trials: Any = sync.trials
    seconds = [1.0 if number == best else 2.0 for number in range(len(trials.compressors))]
    trials.seconds = lambda: seconds


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


class Heads(nn.Module):
    """A body and three heads, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_net(1)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 64) for name in "abc"})
        with torch.no_grad():
            for index, parameter in enumerate(self.heads.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))

    def forward(self, given: Tensor, used: str) -> Tensor:
        hidden = self.body(given)
        return torch.stack([self.heads[name](hidden).square().mean() for name in used]).sum()


USED = {
    "static": lambda rank, step: "abc",
    "one rank": lambda rank, step: "abc"[: 1 + (rank + step) % 3],
    "all ranks": lambda rank, step: "ab" if step % 3 else "c",
}
"""Which heads a rank uses in a step."""


def skip_not_finite(rank: int, world_size: int, spec: str, algorithm: str, ddp: bool, group: Any = None) -> None:
    """Runs that meet an Inf or NaN in one gradient of the last rank, and one that does not: they end alike."""
    ends = []
    for where in (0, 1, 3, None):  # compressed, dense, in another bucket, nowhere
        model, sync, finish = attached(
            Given(),
            policy(spec),
            ddp,
            SEVERAL,
            collective=Collective(algorithm=algorithm),
            **({} if ddp else {"group": group}),
        )
        module = model.module if ddp else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(8):
            if step == 4 and where is not None:
                before, steps = sync_bits(sync), sync.steps
                given = gradients(module, rank, 500)
                if rank == world_size - 1:
                    given[where][-1] = (torch.inf, -torch.inf, torch.nan)[where % 3]
                optimizer.zero_grad()
                model(given).backward()
                finish()
                assert sync.finite is False
                assert all(bool(parameter.grad.isnan().all()) for parameter in model.parameters())
                assert_same(before, sync_bits(sync), "residuals")
                assert (sync.steps, sync.stats.skipped) == (steps, 1)
            optimizer.zero_grad()
            model(gradients(module, rank, step)).backward()
            finish()
            assert sync.finite is True
            optimizer.step()
        ends.append(weight_bits(model) | sync_bits(sync))
    for end in ends[:-1]:
        assert_same(end, ends[-1], "the ends of the runs")
