"""`thinwire.attach`: what DDP guarantees holds with the hook, and what compression guarantees holds under DDP."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import (
    SEVERAL,
    SPECS,
    TOPK,
    USED,
    VIEWS,
    Given,
    Heads,
    assert_same,
    attached,
    average,
    average_residuals,
    grad_bits,
    gradients,
    identical,
    loss_of,
    make_net,
    policy,
    raises,
    skip_not_finite,
    sync_bits,
    train,
    weight_bits,
)
from thinwire import Collective
from thinwire.testing import RankPool


def compare_with_plain(rank: int, world_size: int, used: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    models = [DistributedDataParallel(Heads().to(dtype), **options) for _ in range(2)]
    sync = thinwire.attach(models[1], "none")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    for step in range(7):
        given = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(given, USED[used](rank, step)).backward()
        assert_same(grad_bits(models[0]), grad_bits(models[1]), f"gradients of step {step}")
        for optimizer in optimizers:
            optimizer.step()
    assert_same(weight_bits(models[0]), weight_bits(models[1]), "weights")
    assert sync.steps == 7
    assert sync.finite is None  # it is not checked
    assert sync.stats.bytes_sent == sync.stats.bytes_dense > 0


PLAIN: dict[str, tuple[int, str, dict[str, Any], torch.dtype]] = {
    "one bucket": (2, "static", {}, torch.float64),
    "bucket view": (3, "static", VIEWS, torch.float32),
    "static graph": (2, "static", {**SEVERAL, "static_graph": True}, torch.bfloat16),
    "unused on a rank": (3, "one rank", {**SEVERAL, "find_unused_parameters": True}, torch.float32),
    "unused on all": (2, "all ranks", {**VIEWS, "find_unused_parameters": True}, torch.float32),
}


@pytest.mark.parametrize("case", PLAIN)
def test_none_equals_plain_ddp(ranks: RankPool, case: str) -> None:
    ranks.run(compare_with_plain, *PLAIN[case])


def conserve(rank: int, world_size: int, spec: str, algorithm: str, options: dict[str, Any], warmup: Any) -> Any:
    """What came out plus the residuals is what came in, as an average over ranks, after every step."""
    model, sync, _ = attached(
        Given(), policy(spec, warmup=warmup), True, options, collective=Collective(algorithm=algorithm)
    )
    came_in = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in model.module.named_parameters()}
    came_out = {name: tensor.clone() for name, tensor in came_in.items()}
    layouts = set()
    for step in range(8):
        model.zero_grad()
        given = gradients(model.module, rank, step)
        model(given).backward()
        layouts.add(str(sync.state_dict()["layout"]))
        left = average_residuals(sync)
        for (name, parameter), gradient in zip(model.module.named_parameters(), given, strict=True):
            came_in[name] += average(gradient)
            came_out[name] += parameter.grad.double()
            total = came_out[name] + left.get(name, 0.0)
            torch.testing.assert_close(total, came_in[name], rtol=0, atol=3e-5 * world_size * (step + 1))
    assert len(layouts) == 2, f"the buckets were never rebuilt: {layouts}"
    assert sync.residual_norm() > 0
    assert sync.finite is True
    assert any(algorithm in used or algorithm == "auto" for used in sync.stats.algorithms)
    assert sync.stats.bytes_sent < sync.stats.bytes_dense
    return grad_bits(model)


RAMP = [(2, "none"), (2, "quantize:bits=8"), (2, "topk:ratio=1/4,bits=4,chunk=512")]


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_lost_over_steps_and_a_rebuild(ranks: RankPool, name: str) -> None:
    """And replicas stay identical."""
    assert identical(ranks.run(conserve, 3, *SPECS[name], {"bucket_cap_mb": 0.008}, ()))
    assert identical(ranks.run(conserve, 2, *SPECS[name], {}, RAMP if name in ("topk", "sharded") else ()))


def conserve_unused(rank: int, world_size: int, view: bool) -> None:
    """Head c is used on all ranks, then on one, then on none: its residual must not vanish."""
    model = DistributedDataParallel(Heads(), find_unused_parameters=True, gradient_as_bucket_view=view)
    sync = thinwire.attach(model, policy(TOPK))
    came_in = came_out = torch.zeros(64 * 8, dtype=torch.float64)
    for step, used in enumerate([("abc", "abc"), ("abc", "ab"), ("ab", "ab"), ("ab", "a"), ("abc", "abc")]):
        given = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))
        alone = Heads()
        alone(given, used[rank]).backward()
        gradient = alone.heads["c"].weight.grad
        came_in = came_in + average(torch.zeros(64 * 8) if gradient is None else gradient.view(-1))
        model.zero_grad()
        model(given, used[rank]).backward()
        result = model.module.heads["c"].weight.grad
        came_out = came_out + (0 if result is None else result.double().view(-1))
        left = average_residuals(sync)["heads.c.weight"]
        torch.testing.assert_close(came_out + left, came_in, rtol=0, atol=1e-5)


def test_nothing_is_lost_of_parameters_without_use_in_a_step(ranks: RankPool) -> None:
    for view in (False, True):
        ranks.run(conserve_unused, 2, view)


def four_micro_batches_are_one_big_batch(rank: int, world_size: int) -> None:
    """Whole numbers: the sum over micro-batches is exact, so bits must be those of one big batch."""
    (model, sync, _), (big, big_sync, _) = (attached(Given(), policy(TOPK), True, SEVERAL) for _ in range(2))
    for step in range(4):
        micro = [gradients(big.module, rank, 10 * step + part, whole=True) for part in range(4)]
        model.zero_grad()
        with model.no_sync():
            for part in micro[:3]:
                model(part).backward()
        model(micro[3]).backward()
        big.zero_grad()
        big([sum(parts) for parts in zip(*micro, strict=True)]).backward()
        assert_same(grad_bits(model), grad_bits(big), f"gradients of step {step}")
        assert_same(sync_bits(sync), sync_bits(big_sync), f"residuals of step {step}")
    assert sync.steps == 4


def several_models_in_one_process(rank: int, world_size: int) -> None:
    """Three models, alone and then mixed: one backward pass for two of them, their own collectives between."""
    ends: list[list[dict[str, bytes]]] = []
    for mixed in (False, True):
        made: list[tuple[Any, Any, Any]] = []
        for index, (spec, algorithm) in enumerate(list(SPECS.values())[:3]):
            model, sync, _ = attached(
                make_net(index), policy(spec), True, SEVERAL, collective=Collective(algorithm=algorithm)
            )
            made.append((model, torch.optim.SGD(model.parameters(), lr=0.05), sync))
            if not mixed:
                train(*made[-1][:2], rank, 0, 6)
        for step in range(6 if mixed else 0):
            losses = []
            for model, optimizer, _ in made:
                optimizer.zero_grad()
                losses.append(loss_of(model, rank, step))
            total = torch.tensor(float(rank))
            losses[2].backward()
            dist.all_reduce(total)
            (losses[0] + losses[1]).backward()
            assert total == sum(range(world_size))
            for _, optimizer, _ in made:
                optimizer.step()
        ends.append([weight_bits(model) | sync_bits(sync) for model, _, sync in made])
    for index, (alone, together) in enumerate(zip(*ends, strict=True)):
        assert_same(alone, together, f"model {index}")


def test_an_inf_on_one_rank_is_skipped_by_all(ranks: RankPool) -> None:
    for name in ("sharded", "quantize"):  # between threads there are more
        ranks.run(skip_not_finite, 3, *SPECS[name], True)


def fail_in_backward(rank: int, world_size: int, breaks_at: int) -> None:
    """The first layer to be reached breaks: DDP itself goes on. One in the middle: DDP wants to be made anew."""

    def fail(*_: Any) -> None:
        raise KeyError("in the backward pass")

    ends = []
    for is_bad in (True, False):
        model, sync, _ = attached(make_net(), policy(TOPK), True, SEVERAL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(model, optimizer, rank, 0, 3)
        if is_bad:
            before = sync_bits(sync)
            hook = model.module[breaks_at].register_full_backward_pre_hook(fail)
            with raises(KeyError):
                train(model, optimizer, rank, 99, 100)
            hook.remove()
            assert_same(before, sync_bits(sync), "residuals")
            if breaks_at < 6:
                saved = sync.state_dict()
                model, sync, _ = attached(model.module, policy(TOPK), True, SEVERAL)
                sync.load_state_dict(saved)
        train(model, optimizer, rank, 3, 6)
        ends.append(weight_bits(model) | sync_bits(sync))
    assert_same(*ends, "the ends of the two runs")


@pytest.mark.parametrize("breaks_at", [6, 3], ids=["at its start", "in the middle"])
def test_an_exception_in_backward_does_not_poison_the_next_step(ranks: RankPool, breaks_at: int) -> None:
    ranks.run(fail_in_backward, 2, breaks_at)


def the_warning_for_adam_on_sparse_gradients(rank: int, world_size: int) -> None:
    bystander = torch.optim.Adam([torch.ones(3, requires_grad=True)])  # of no attached model
    for spec, kind, count in (
        (policy(TOPK), "AdamW", 1),
        (policy("randomk:ratio=1/8"), "RMSprop", 1),
        (policy("quantize:bits=8", overrides={"0.*": TOPK}), "Adam", 1),
        (policy(TOPK), "SGD", 0),
        (policy("quantize:bits=8"), "AdamW", 0),
    ):
        model = attached(make_net(), spec, True)[0]
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bystander.step()
            train(model, optimizer, rank, 0, 3)
        found = [str(warning.message) for warning in caught]
        assert len(found) == count, (spec, kind, found)
        assert all("thinwire.AdamW" in text and kind in text for text in found)


def what_attach_cannot_do_is_refused(rank: int, world_size: int) -> None:
    def make() -> DistributedDataParallel:
        return DistributedDataParallel(make_net())

    with raises(ValueError, "Sequential", "DistributedDataParallel"):
        thinwire.attach(make_net(), "none")
    for spec, options, word in (
        ("nonsense:ratio=1", {}, "nonsense"), ("topk:ratio=2", {}, "ratio"), (5, {}, "expected"),
        (TOPK, {"group": 5}, "5"), (TOPK, {"grad_scaler": 5}, "grad_scaler"),
        (policy(TOPK, exclude=["embedding.*"]), {}, "fits no parameter"),
        (policy(TOPK, overrides={"head": "none"}), {}, "fits no parameter"),
    ):  # fmt: skip
        with raises(ValueError, word):
            thinwire.attach(make(), spec, **options)
    for wrong in ({"shard_compressor": "nonsense"}, {"algorithm": "nonsense"}, {"timeout": -1}, {"max_bytes": -1}):
        with raises(ValueError, str(*wrong.values())):
            thinwire.attach(make(), TOPK, collective=Collective(**wrong))
    with raises(ValueError, "fits no parameter"):
        thinwire.SGD(make_net(), compressor=policy(TOPK, exclude=["embedding.*"]))
    ddp = make()
    thinwire.attach(ddp, "none")
    with raises((ValueError, RuntimeError), "hook"):
        thinwire.attach(ddp, "none")
    with raises(ValueError, "has a communication hook already", "thinwire.attach"):
        thinwire.AdamW(ddp, compressor=policy(TOPK))


def a_sparse_gradient_is_refused_before_ddp_gets_a_hook(rank: int, world_size: int) -> None:
    def step(ddp: Any) -> None:
        ddp.zero_grad()
        ddp(torch.tensor([1, 2, 3])).sum().backward()

    def words() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 1))

    ddp = DistributedDataParallel(words())
    for make in (lambda: thinwire.attach(ddp, "none"), lambda: thinwire.AdamW(ddp), lambda: thinwire.SGD(ddp)):
        with raises(ValueError, "'0.weight'", "sparse=False"):
            make()
    step(ddp)  # DDP works as before
    assert ddp.module[0].weight.grad.is_sparse
    ignoring = words()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.weight"])
    ddp = DistributedDataParallel(ignoring)
    thinwire.attach(ddp, "none")
    step(ddp)


def disagree(rank: int, world_size: int, specs: list[Any]) -> str:
    model, *_ = attached(make_net(), specs[rank % len(specs)], True)
    with pytest.raises(thinwire.CollectiveError) as caught:
        loss_of(model, rank, 0).backward()
    return str(caught.value)


@pytest.mark.parametrize("other", [policy("quantize:bits=8"), policy("none"), policy(TOPK, min_numel=3000)], ids=str)
def test_ranks_that_disagree_fail_at_once(ranks: RankPool, other: thinwire.Policy) -> None:
    found = ranks.run(disagree, 3, [policy(TOPK), other], timeout=12)  # else a rank waits in vain
    assert all("rank" in text for text in found), found
    assert any("differ" in text or "compressor" in text or "spec" in text for text in found), found


SCENES = {
    four_micro_batches_are_one_big_batch: 2, several_models_in_one_process: 3,
    the_warning_for_adam_on_sparse_gradients: 1, a_sparse_gradient_is_refused_before_ddp_gets_a_hook: 2,
    what_attach_cannot_do_is_refused: 1,
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scenes(ranks: RankPool, scene: Any) -> None:
    """What all ranks return is the same."""
    assert identical(ranks.run(scene, SCENES[scene]))
