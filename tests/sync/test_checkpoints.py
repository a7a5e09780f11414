"""Checkpoints: the same number of ranks goes on bit for bit, another one keeps the residuals, others are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from support.by_threads import by_threads
from support.run import Run, resume, states_of
from support.slow import slow
from support.training import (
    TOPK,
    assert_same,
    average,
    averaged,
    identical,
    make_net,
    plain_module,
    policy,
    raises,
    read,
    weight_bits,
)
from thinwire import Collective
from thinwire.collectives import LocalGroup, LocalWorld
from thinwire.sync.checkpoint import residuals_of
from thinwire.testing import RankPool, run_threads

SHARDED = Collective(algorithm="sharded")
ATTACH: dict[str, Any] = {"kind": "attach", "ddp": True, "collective": SHARDED}
ADAMW: dict[str, Any] = {"kind": "AdamW", "ddp": True, "collective": SHARDED}
CASES = [
    (3, ATTACH, 20),
    (3, ADAMW, 20),
    (3, {"kind": "SGD", "ddp": True, "collective": SHARDED, "max_grad_norm": 0.5}, 20),
    (4, {"kind": "AdamW", "ddp": True, "warmup_steps": 2}, 4),
    slow(2, {"kind": "attach", "compressor": policy("randomk:ratio=1/8")}, 20),
    slow(2, {"kind": "attach", "ddp": True, "compressor": policy(TOPK, warmup=[(30, "quantize:bits=8")])}, 20),
    slow(2, {"kind": "AdamW", "warmup_steps": 30}, 20),
]


def kind_of(value: Any) -> Any:
    return value.get("kind", str(value)) if isinstance(value, dict) else None


@pytest.mark.parametrize(("world_size", "how", "step"), CASES, ids=kind_of)
def test_a_resumed_run_is_the_run_that_never_stopped(
    ranks: RankPool, tmp_path: Path, world_size: int, how: dict[str, Any], step: int
) -> None:
    """AdamW averages its second moments at steps 16 and 32."""
    ranks.run(resume, world_size, how, [step], step + 15, tmp_path)


@pytest.mark.parametrize("how", [ATTACH, {"kind": "AdamW", "ddp": True}], ids=kind_of)
def test_a_run_may_be_saved_at_any_step(ranks: RankPool, tmp_path: Path, how: dict[str, Any]) -> None:
    """At 0 nothing is known, at 1 DDP is about to rebuild its buckets."""
    ranks.run(resume, 2, how, [0, 1, 2], 4, tmp_path)


STEP = 15


def save_twice(rank: int, world_size: int, how: dict[str, Any], folder: Path) -> bytes:
    run = Run(rank, **how)
    run.train(0, STEP)
    return states_of(run, folder)["own"]


def load_for_others(rank: int, world_size: int, how: dict[str, Any], saved: list[bytes], folder: Path) -> Any:
    """Load the states of all old ranks: averages of residuals and of momentum stay, and replicas after it are alike."""
    states, run, other = [read(state) for state in saved], Run(rank, **how), Run(rank, **how)
    run.load(states)
    loaded = thinwire.load_per_rank(folder, "owner")
    other.load([{**states[0], run.key: state} for state in loaded])
    assert_same(run.bits(), other.bits(), "from torch's checkpoint")
    with raises(ValueError, "'nothing'", "model", "owner"):
        thinwire.load_per_rank(folder, "nothing")
    before: dict[str, Tensor] = {}
    for state in states:
        for name, residual in residuals_of(state.get("sync", state["optimizer"].get("thinwire"))).items():
            before[name] = before.get(name, 0) + residual.double() / len(saved)
    sizes = {name: parameter.numel() for name, parameter in plain_module(run.model).named_parameters()}
    mine = residuals_of(run.sync.state_dict())  # a rank that took nothing over has none
    after = {name: average(mine.get(name, torch.zeros(sizes[name]))) for name in sorted(before)}
    assert any(bool(tensor.any()) for tensor in before.values())
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-7)
    if run.kind != "attach":
        kind = "exp_avg" if run.kind == "AdamW" else "momentum_buffer"
        here = run.optimizer.state_dict()["state"]
        for number in states[0]["optimizer"]["state"]:
            old = sum(state["optimizer"]["state"][number][kind].double() for state in states) / len(saved)
            parameter = run.optimizer.param_groups[0]["params"][number]
            new = here[number][kind] if number in here and kind in here[number] else torch.zeros(parameter.shape)
            torch.testing.assert_close(average(new), old, rtol=1e-5, atol=1e-8)
    assert run.sync.steps == STEP
    run.train(STEP, STEP + 12)
    assert run.sync.steps == STEP + 12
    return weight_bits(run.model)


@pytest.mark.parametrize(
    ("old_size", "new_size", "how", "then"),
    [
        (4, 2, ATTACH, {}),
        (4, 2, ADAMW, {}),
        (2, 3, {"kind": "AdamW", "warmup_steps": STEP + 1}, {}),
        slow(2, 3, {"kind": "SGD"}, {}),
        (3, 3, ATTACH, {"buckets": {}}),
        (3, 3, ADAMW, {"buckets": {}}),
    ],
    ids=kind_of,
)
def test_another_number_of_ranks_or_another_bucket_size(
    ranks: RankPool, tmp_path: Path, old_size: int, new_size: int, how: dict[str, Any], then: dict[str, Any]
) -> None:
    saved = ranks.run(save_twice, old_size, how, tmp_path)
    assert identical(ranks.run(load_for_others, new_size, how | then, saved, tmp_path))


@by_threads(2)
def test_checkpoints_that_do_not_fit_are_refused_and_change_nothing(group: LocalGroup) -> None:
    rank, world_size = group.rank, group.size

    def trained(kind: str = "attach", steps: int = 2, **options: Any) -> Run:
        run = Run(rank, kind, group=group, **({"warmup_steps": 1} if kind == "AdamW" else {}), **options)
        run.train(0, steps)
        return run

    def saved(*args: Any, **options: Any) -> Any:
        return trained(*args, **options).owner.state_dict()

    right, of_sgd, of_adamw = saved(), saved("SGD"), saved("AdamW")
    runs = {kind: trained(kind, 1) for kind in ("attach", "AdamW", "SGD")}

    def attempt(state: Any, *words: str, kind: str = "attach") -> None:
        run = runs[kind]
        before, steps, groups = run.bits(), run.sync.steps, str(run.optimizer.param_groups)
        with raises(ValueError, *words):
            run.owner.load_state_dict(state)
        assert_same(before, run.bits(), f"after a refusal that says {words}")
        assert (run.sync.steps, str(run.optimizer.param_groups)) == (steps, groups)

    attempt(saved(compressor=policy("quantize:bits=8")), "compressor", "quantize:bits=8", "topk")
    attempt(saved(compressor=policy(TOPK, min_numel=2000)), "small", "2000", "100")
    attempt(saved(compressor=policy(TOPK, warmup=[(5, "quantize:bits=8")])), "warmup")
    attempt({**right, "format": 99}, "99")
    attempt({**right, "rank": rank + world_size}, f"rank {rank + world_size} of {world_size}", "damaged")
    attempt({**right, "rank": (rank + 1) % world_size}, f"rank {rank} of {world_size}")
    attempt({**right, "entries": {**right["entries"], "0.weight": 7}}, "0.weight", "7", "another model")
    attempt({**right, "entries": {**right["entries"], "more": 7}}, "more", "another model")
    attempt({**right, "world_size": world_size + 1, "rank": rank + 1}, f"rank {rank} of {world_size}")
    for name in ("0.weight", "0.bias"):
        cut = {**right["residuals"], name: right["residuals"][name][:-1]}
        attempt({**right, "residuals": cut}, name)
    for garbage in (None, 5, "abc", {}, [], [5], {"format": 1}, {"format": 1, "world_size": world_size, "rank": rank}):
        attempt(garbage, "state")
    attempt({key: value for key, value in right.items() if key != "policy"}, "state")

    attempt(of_adamw, "AdamW", "SGD", kind="SGD")
    attempt(of_sgd, "AdamW", "SGD", kind="AdamW")
    attempt(saved("SGD", warmup_steps=3), "warmup", kind="SGD")
    for garbage in (None, 5, {}, [5], torch.optim.AdamW(make_net().parameters()).state_dict()):
        attempt(garbage, "state", kind="SGD")
    broken = {**of_sgd, "param_groups": of_sgd["param_groups"] * 2}
    attempt(broken, "group", kind="SGD")


@by_threads(2)
def test_a_checkpoint_of_a_model_with_other_names(group: LocalGroup) -> None:
    """A plain loop learns the names of the model at its first step: then at the latest must it see that they differ."""
    syncs = [thinwire.Synchronizer(policy(TOPK), group=group) for _ in range(2)]
    for sync, model in zip(syncs, (make_net(), nn.ModuleDict({"net": make_net()})), strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + group.rank)
        if sync is syncs[0]:
            sync.all_reduce_gradients(model)
            syncs[1].load_state_dict(sync.state_dict())
    with raises(ValueError, "another model"):
        syncs[1].all_reduce_gradients(model)


def test_groups_in_another_order() -> None:
    net, group = make_net(), LocalWorld(1).groups[0]

    def make(*layers: str) -> Any:
        groups = [{"params": [(name, p) for name, p in net.named_parameters() if name[0] in part]} for part in layers]
        return thinwire.SGD(groups, lr=0.1, compressor=policy(TOPK), group=group)

    with raises(ValueError, "parameter group 0", "other parameters"):
        make("2346", "0").load_state_dict(make("0", "2346").state_dict())


# Another number of ranks: in the end all that came in has come out ----------------------------------------------------
# The sums are made outside of the library. Steps without gradients send what is left, so that no residual is read here.

SIZES = {"a": 6000, "b": 9000}
POLICY = thinwire.Policy("topk:ratio=1/8,bits=32,chunk=512", min_numel=0)
OF_SUMS = "topk:ratio=1/8,bits=32,chunk=512"
"""The compressor of sums sends half of what two ranks send, so that owners keep the other half."""


def gradient(rank: int, step: int) -> dict[str, Tensor]:
    """Zeros after four steps."""
    generator, factor = torch.Generator().manual_seed(100 * step + rank), step < 4
    return {name: factor * torch.randn(size, generator=generator) for name, size in SIZES.items()}


def exchange(
    group: LocalGroup, algorithm: str, states: list[Any], steps: range
) -> tuple[Any, dict[str, Tensor], float]:
    """(its state, the sum of what came out, what is kept) after these steps from the states of all old ranks."""
    collective = Collective(algorithm=algorithm, shard_compressor=OF_SUMS if algorithm == "sharded" else None)
    sync = thinwire.Synchronizer(POLICY, group=group, collective=collective)
    out = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    if states:
        sync.load_state_dict(states)
    for step in steps:
        for name, mean in averaged(sync, **gradient(group.rank, step)).items():
            out[name] += mean
    return sync.state_dict(), out, sync.residual_norm()


@pytest.mark.parametrize(("algorithm", "before", "after"), [("sharded", 2, 3), ("sharded", 3, 1), ("gather", 3, 2)])
def test_what_came_in_is_sent_or_kept_after_a_change_of_ranks(algorithm: str, before: int, after: int) -> None:
    saved = run_threads(exchange, before, algorithm, [], range(4))
    ends = run_threads(exchange, after, algorithm, [state for state, *_ in saved], range(4, 28))
    for name, sent in saved[0][1].items():
        came_in = sum(gradient(rank, step)[name].double() for rank in range(before) for step in range(4)) / before
        assert float((came_in - sent).norm() / came_in.norm()) > 0.3, "much must be left at the change"
        for _, out, norm in ends:
            assert norm == 0.0, "24 steps send all that is left"
            torch.testing.assert_close(sent + out[name], came_in, rtol=1e-5, atol=1e-5)


def momentum_run(group: LocalGroup, states: list[dict[str, Any]] | None, ends: bool) -> Any:
    """The state after four steps; or the weights after six more without gradients, which momentum alone moves."""
    named = {name: nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
    optimizer = thinwire.SGD(named.items(), lr=0.5, momentum=0.9, compressor="topk:ratio=1,bits=32", group=group)
    if states is not None:
        optimizer.load_state_dict([state["optimizer"] for state in states])
        for name, parameter in named.items():
            parameter.data.copy_(states[0]["weights"][name])
    for step in range(0 if states is None else 4, 10 if ends else 4):
        for name, given in gradient(group.rank, step).items():
            named[name].grad = given
        optimizer.step()
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return weights if ends else {"optimizer": optimizer.state_dict(), "weights": weights}


def test_momentum_goes_on_after_a_change_of_ranks() -> None:
    """Its average over ranks counts. Of three ranks, the last takes over nothing of two."""
    uninterrupted = run_threads(momentum_run, 2, None, True)[0]
    saved = run_threads(momentum_run, 2, None, False)
    for weights in run_threads(momentum_run, 1, saved, True) + run_threads(momentum_run, 3, saved, True):
        for name, weight in weights.items():
            assert float((weight - saved[0]["weights"][name]).norm()) > 1.0, "momentum must move it"
            torch.testing.assert_close(weight, uninterrupted[name], rtol=1e-5, atol=1e-5)
