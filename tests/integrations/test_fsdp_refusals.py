"""What is refused for models sharded by FSDP2, with sentences that say what to do."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire
from support.optimizers import make
from support.sharded import call_all, local_bits, shard, sharded_net
from support.training import make_batch, make_net, raises
from thinwire.testing import RankPool


def refused(rank: int, mesh: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    between, inside = mesh["replicate"], mesh["shard"]

    def adamw(model: nn.Module, **options: Any) -> Any:
        return thinwire.AdamW(model, **{"group": between, **options})

    with raises(ValueError, "2 dimensions", 'mesh=mesh["shard"]', 'group=mesh["replicate"]'):
        adamw(fully_shard(make_net(), mesh=mesh))
    for group, words in ((None, "without group="), (mesh, "expected one process group"), (inside, "of this replica")):
        with raises(ValueError, words, 'group=mesh["replicate"]'):
            adamw(sharded_net(mesh), group=group)
    partly = make_net()
    fully_shard(partly[0], mesh=inside)
    with raises(ValueError, "'2.weight' is a plain tensor", "'0.weight' is sharded"):
        adamw(partly)
    copied = make_net()
    copied[0].weight = nn.Parameter(distribute_tensor(copied[0].weight.detach(), inside, [Replicate()]))
    for parameter in list(copied.parameters())[1:]:
        parameter.requires_grad_(False)
    with raises(ValueError, "(Replicate(),)", "expected one Shard"):
        adamw(copied)
    with raises(ValueError, "FullyShardedDataParallel", "fully_shard"):
        adamw(FullyShardedDataParallel(make_net(), process_group=inside.get_group(), device_id=torch.device("cpu")))
    gathered = sharded_net(mesh)
    for module in gathered.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    with raises(ValueError, "gathered at this moment", "reshard()"):
        adamw(gathered)
    with raises(ValueError, "sharded", "thinwire.attach"):
        sync = thinwire.Synchronizer("quantize:bits=8", group=between)
        sync.all_reduce_gradients(sharded_net(mesh).named_parameters())

    model = sharded_net(mesh)
    optimizer = adamw(model)
    with raises(ValueError, "part of the backward pass"):
        optimizer.exchange()
    given, wanted = make_batch(rank, 0)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    (model(given) - wanted).square().mean().backward()
    with raises(RuntimeError, "no gradients were exchanged", "set_requires_gradient_sync(True)"):
        optimizer.step()


def changes_gradients(rank: int, mesh: Any) -> None:
    model = sharded_net(mesh)
    optimizer = make("SGD", model, group=mesh["replicate"])
    given, wanted = make_batch(rank, 0)
    for change in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda: model[0].weight.grad.to_local().mul_(2),  # type: ignore[index,union-attr,operator]
        lambda: setattr(model[0].weight, "grad", model[0].weight.grad.clone()),  # type: ignore[index,union-attr]
    ):
        optimizer.zero_grad()
        (model(given) - wanted).square().mean().backward()
        change()
        before = local_bits(model)
        with raises(RuntimeError, "was changed after it was exchanged", "max_grad_norm="):
            optimizer.step()
        assert local_bits(model) == before
    optimizer.zero_grad()


class Reentrant(nn.Sequential):
    def forward(self, given: Tensor) -> Tensor:
        for layer in self:
            given = checkpoint(layer, given, use_reentrant=True)
        return given


def reentrant(rank: int, mesh: Any) -> None:
    model = shard(Reentrant(*make_net()), mesh)
    optimizer = make("SGD", model, group=mesh["replicate"])
    given, wanted = make_batch(rank, 0)
    with raises(RuntimeError, "a second exchange", "use_reentrant=False"):
        (model(given.requires_grad_()) - wanted).square().mean().backward()
    optimizer.zero_grad()


def test_refusals_say_what_to_do(ranks: RankPool) -> None:
    found = call_all(ranks, {each.__name__: (each,) for each in (refused, changes_gradients, reentrant)})
    for name in ("refused", "changes_gradients", "reentrant"):
        assert found[name] == [None] * 4
