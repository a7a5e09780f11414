"""What an ordinary script does with its optimizer: it works as with torch's, or an error says what to do."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from support.optimizers import OPTIONS, make
from support.training import TOPK, identical, loss_of, make_net, policy, train, weight_bits
from thinwire.collectives import LocalGroup
from thinwire.testing import run_threads


def test_options_that_only_select_an_implementation_are_taken() -> None:
    for kind, off in (("AdamW", {"amsgrad": False, "capturable": False}), ("SGD", {"dampening": 0, "maximize": False})):
        ends = []
        for options in ({}, {"fused": True}, {"foreach": True}, {"fused": False, "foreach": None, **off}):
            model = make_net()
            optimizer = getattr(thinwire, kind)(model.parameters(), **OPTIONS[kind], **options)
            train(model, optimizer, 0, 0, 3)
            ends.append(weight_bits(model))
        assert identical(ends), kind


def test_options_that_change_the_result_are_refused() -> None:
    for kind, option, words in (
        ("AdamW", {"amsgrad": True}, "amsgrad=True.*leave it out"),
        ("AdamW", {"maximize": True}, "maximize=True.*negative loss"),
        ("AdamW", {"capturable": True}, "capturable=True.*CUDA graph"),
        ("AdamW", {"differentiable": True}, "differentiable=True"),
        ("AdamW", {"algorithm": "gather"}, r"collective=thinwire.Collective\(algorithm='gather'\)"),
        ("SGD", {"timeout": 3.0}, r"collective=thinwire.Collective\(timeout=3.0\)"),
        ("AdamW", {"momentun": 0.9}, "unknown argument 'momentun'"),
        ("SGD", {"maximize": True}, "maximize=True.*negative loss"),
        ("SGD", {"dampening": 0.5}, r"dampening=0\.5"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            getattr(thinwire, kind)(make_net(), **option)


def test_arguments_have_torchs_order() -> None:
    sgd = thinwire.SGD(make_net().parameters(), 0.1, 0.9, 0, 1e-4, True)
    adamw = thinwire.AdamW(make_net().parameters(), 0.1, (0.8, 0.9), 1e-7, 0.2, False)
    for made, names in (
        (sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}),
        (adamw, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.2}),
    ):
        assert {name: made.param_groups[0][name] for name in names} == names


def test_one_process_without_a_group_is_torchs_optimizer() -> None:
    cases: dict[str, dict[str, Any]] = {"AdamW": {"weight_decay": 0.1}, "SGD": {"momentum": 0.9, "nesterov": True}}
    for kind, options in cases.items():
        ends = []
        for library in (torch.optim, thinwire):
            model = make_net()
            optimizer = getattr(library, kind)(model.named_parameters(), lr=1e-2, **options)
            train(model, optimizer, 0, 0, 20)
            ends.append(nn.utils.parameters_to_vector(model.parameters()))
        torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-7)
        again = getattr(thinwire, kind)(make_net(), **options)
        again.load_state_dict(optimizer.state_dict())
        assert again.sync.steps == 20


def test_one_process_of_several_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4; call torch\.distributed\.init_process_group"):
        thinwire.SGD(make_net())


def test_a_complex_parameter_is_named() -> None:
    model = nn.ParameterDict({"real": torch.zeros(3), "phase": torch.zeros(3, dtype=torch.complex64)})
    with pytest.raises(ValueError, match=r"'phase' is complex.*view_as_complex"):
        thinwire.AdamW(model)
    sync = thinwire.Synchronizer("quantize:bits=8")
    with pytest.raises(ValueError, match="'phase' is complex"):
        sync.register_parameters(model.named_parameters())


def compile_some(group: LocalGroup) -> None:
    """Names of a compiled model begin with _orig_mod: a resume with or without it is the same run."""
    ends = []
    for before, after in ((False, False), (True, False), (False, True), ("inside", True)):
        plain, optimizers = [], []
        for compiled in (before, after):
            model = make_net()
            plain.append(nn.Sequential(*model))
            if compiled == "inside":
                model[2] = torch.compile(model[2], backend="eager")
            given = torch.compile(model, backend="eager") if compiled is True else model
            optimizers.append(make("AdamW", given, group=group, warmup_steps=2))
        train(plain[0], optimizers[0], group.rank, 0, 4)
        plain[1].load_state_dict(plain[0].state_dict())
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        assert not any("_orig_mod" in name for name, _ in optimizers[1].named_parameters())
        train(plain[1], optimizers[1], group.rank, 4, 6)
        ends.append(weight_bits(plain[1]))
    assert identical(ends)
    sync = thinwire.Synchronizer(policy(TOPK), group=group)
    sync.all_reduce_gradients(torch.compile(plain[1], backend="eager"))
    assert sync.residuals.keys() == dict(plain[1].named_parameters()).keys()


def test_a_model_may_be_compiled_on_one_side_of_a_resume() -> None:
    run_threads(compile_some, 2)


def reset_gradients(group: LocalGroup) -> None:
    """zero_grad before backward, after step, of the model, or by hand."""
    ends = []
    for where in range(4):
        model = make_net()
        optimizer = make("AdamW", model, group=group, warmup_steps=2)
        for step in range(5):
            if where == 0:
                optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            optimizer.step()
            if where == 1:
                optimizer.zero_grad(set_to_none=False)
            if where == 2:
                model.zero_grad()
            for parameter in model.parameters() if where == 3 else ():
                parameter.grad = None
        ends.append(weight_bits(model))
    assert identical(ends)


def test_gradients_may_be_reset_at_either_place() -> None:
    run_threads(reset_gradients, 2)


def save(group: LocalGroup, who: list[str]) -> None:
    """Each of `who` says which ranks save after a step."""
    model = make_net()
    optimizer = make("SGD", model, group=group)
    optimizer.state_dict()  # before the first step nothing differs
    for step, each in enumerate([*who, "nobody"]):
        train(model, optimizer, group.rank, step, step + 1)
        if each == "consolidated":
            optimizer.consolidate_state_dict()
        if each == "all" or (each != "nobody" and group.rank == 0):
            optimizer.state_dict()
    train(model, optimizer, group.rank, len(who) + 1, len(who) + 2)


def save_one_of_two(group: LocalGroup, alone: tuple[str, ...]) -> None:
    """Two models with the same names, after 3 steps and 1. All ranks save both, or rank 0 the first alone."""
    both = [(model, make("SGD", model, group=group)) for model in (make_net(), make_net())]
    for (model, optimizer), last in zip(both, (3, 1), strict=True):
        train(model, optimizer, group.rank, 0, last)
    if group.rank == 0 or not alone:
        both[0][1].state_dict()
    train(*both[1], group.rank, 1, 5 if alone else 2)
    both[1][1].state_dict()
    for model, optimizer in both:
        train(model, optimizer, group.rank, 5, 6)


def warned(*who: str, function: Any = save) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(function, 3, who)
    return [str(one.message) for one in caught if "state_dict" in str(one.message)]


def test_rank_0_is_warned_if_it_saves_alone() -> None:
    """Once, also if what was saved before is complete."""
    for before in ("nobody", "consolidated", "all"):
        (message,) = warned(before, "rank 0", "nobody", "rank 0")
        assert "rank 0 called state_dict(), and rank 1 did not" in message, before
        assert "consolidate_state_dict()" in message
    assert warned("all", "all", "nobody", "consolidated", "all", "consolidated") == []


def test_models_with_the_same_names_are_told_apart() -> None:
    assert warned(function=save_one_of_two) == []
    assert len(warned("alone", function=save_one_of_two)) == 1
