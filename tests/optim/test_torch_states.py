"""From torch's optimizers and back to them: their moments, in their unit; and states that do not fit."""

from typing import Any

import pytest
import torch

import thinwire
from support.training import TOPK, identical, loss_of, make_net, optimizer_bits, policy, raises, take, weight_bits
from thinwire.collectives import LocalGroup, LocalWorld
from thinwire.testing import run_threads

BETAS = (0.8, 0.95)
OF_TORCH: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 3e-3, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.1},
    "SGD": {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3},
}
BOTH = pytest.mark.parametrize("kind", list(OF_TORCH))
WARMUP = {"AdamW": 2, "SGD": 0}
STEPS = 20


def trained(kind: str, model: Any, last: int, first: int = 0, rank: int = 0, optimizer: Any = None) -> Any:
    optimizer = optimizer or getattr(torch.optim, kind)(model.parameters(), **OF_TORCH[kind])
    for step in range(first, last):
        take(optimizer, loss_of(model, rank, step))
    return optimizer


def made(kind: str, group: LocalGroup, model: Any, **others: Any) -> Any:
    options = {"warmup_steps": WARMUP[kind], "warmup": "none", **OF_TORCH[kind], **others}
    options = {"compressor": policy(TOPK, small_compressor="none"), **options}
    return getattr(thinwire, kind)(model.named_parameters(), group=group, **options)


def loaded(kind: str, model: Any, state: Any) -> Any:
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1.0)
    optimizer.load_state_dict(state)
    return optimizer


def with_noise(group: LocalGroup, kind: str) -> tuple[dict[str, bytes], Any]:
    """Each rank has its own gradients, and less momentum where it is compressed."""
    model = make_net()
    given = {"compressed_betas": (0.5, 0.9)} if kind == "AdamW" else {"compressed_momentum": 0.1}
    optimizer = made(kind, group, model, **given)
    trained(kind, model, 12, rank=group.rank, optimizer=optimizer)
    before = optimizer_bits(optimizer)
    state = optimizer.torch_state_dict()
    assert optimizer_bits(optimizer) == before
    own = optimizer.state_dict()["state"]
    for number in (0, 2):
        average = {}
        for name in own[number].keys() - {"step"}:
            average[name] = own[number][name].clone()
            thinwire.all_reduce_compressed(average[name], "none", op=torch.distributed.ReduceOp.AVG, group=group)
        if kind == "AdamW":
            c = optimizer.second_moment_scale["0.weight" if number == 0 else "2.weight"]
            weights = optimizer.state_dict()["thinwire"]["weights"][0]
            corrected = average["exp_avg"] / weights[0], average["exp_avg_sq"] * c / weights[1]
            names = "exp_avg", "exp_avg_sq"
            for name, beta, wanted in zip(names, BETAS, corrected, strict=True):
                torch.testing.assert_close(state["state"][number][name] / (1 - beta**12), wanted, rtol=1e-4, atol=1e-8)
        else:
            wanted = average["momentum_buffer"] * (1 - 0.1) / (1 - 0.9)
            torch.testing.assert_close(state["state"][number]["momentum_buffer"], wanted)
    again = made(kind, group, make_net(), warmup_steps=WARMUP[kind] or 1)  # else moments are converted
    again.load_state_dict(loaded(kind, make_net(), state).state_dict())
    for number, moments in again.torch_state_dict()["state"].items():
        for name, moment in moments.items():
            torch.testing.assert_close(moment, state["state"][number][name])
    return weight_bits(model), {n: {k: v.tolist() for k, v in m.items()} for n, m in state["state"].items()}


@BOTH
def test_the_state_for_torch_is_the_same_on_all_ranks_and_in_torchs_unit(kind: str) -> None:
    assert identical(run_threads(with_noise, 3, kind))


def refuse(group: LocalGroup) -> None:
    model = make_net()
    optimizer = made("AdamW", group, model)
    trained("AdamW", model, 4, rank=group.rank, optimizer=optimizer)
    before = optimizer_bits(optimizer)

    def attempt(state: Any, *words: str) -> None:
        with raises(ValueError, *words):
            optimizer.load_state_dict(state)
        assert optimizer_bits(optimizer) == before

    attempt(trained("SGD", make_net(), 1).state_dict(), "another optimizer", "torch.optim.AdamW")
    for other in (torch.optim.Adamax, torch.optim.NAdam):  # with betas, too
        model_of_other = make_net()
        state = trained("", model_of_other, 1, optimizer=other(model_of_other.parameters())).state_dict()
        attempt(state, "another optimizer", "torch.optim.AdamW")
    right = trained("AdamW", make_net(), 2).state_dict()
    with_amsgrad = torch.optim.AdamW(make_net().parameters(), amsgrad=True).state_dict()
    attempt(with_amsgrad, "amsgrad")
    attempt({**right, "param_groups": right["param_groups"] * 2}, "groups of", "the same groups")
    swapped = {**right["state"], 0: right["state"][2], 2: right["state"][0]}
    attempt({**right, "state": swapped}, "'0.weight'", "[64, 64]", "[64, 32]", "another order")


def test_states_of_torch_that_do_not_fit_change_nothing() -> None:
    run_threads(refuse, 2)


def test_the_weight_decay_of_adam_is_another_one() -> None:
    other = torch.optim.Adam(make_net().parameters(), lr=0.5, weight_decay=0.25)
    optimizer = made("AdamW", LocalWorld(1).groups[0], make_net(), weight_decay=0.125)
    with pytest.warns(UserWarning, match=r"0\.25.*0\.125"):
        optimizer.load_state_dict(other.state_dict())
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.125)


def save(group: LocalGroup, kind: str) -> tuple[Any, Any]:
    model = make_net()
    optimizer = made(kind, group, model)
    trained(kind, model, 6, rank=group.rank, optimizer=optimizer)
    return model.state_dict(), optimizer.state_dict()


def lose(group: LocalGroup, kind: str, weights: Any, states: Any, strict: bool) -> tuple[bool, dict[str, bytes]]:
    model = make_net()
    model.load_state_dict(weights)
    optimizer = made(kind, group, model)
    optimizer.load_state_dict(states, strict=strict)
    has_residuals = bool(optimizer.sync.residuals)
    trained(kind, model, 9, 6, rank=group.rank, optimizer=optimizer)
    return has_residuals, weight_bits(model)


@BOTH
def test_a_lost_rank_may_be_left_out(kind: str) -> None:
    (weights, first), _, (_, last) = run_threads(save, 3, kind)
    with pytest.raises(ValueError, match=r"needs the state of rank 1.*strict=False"):
        run_threads(lose, 3, kind, weights, [first, last], True)
    with pytest.warns(UserWarning, match="no state of rank 1 of the 3"):
        found = run_threads(lose, 3, kind, weights, [first, last], False)
    assert [has for has, _ in found] == [True, False, True]
    assert identical([bits for _, bits in found])
    with pytest.warns(UserWarning, match="no state of rank 1, 2 of the 3"):  # what a program saves on rank 0 alone
        found = run_threads(lose, 1, kind, weights, first, False)
    assert found[0][0]
