"""`thinwire.LocalSteps` between ranks that are threads: what a round does, and what it does not."""

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from support.local_steps import Trained, adamw, after_local_step, copies, loss_of, network, same_bits, sgd, train
from support.training import take
from thinwire.sync.step import is_finite
from thinwire.testing import run_threads

SETTINGS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense": {"compressor": "none"},
    "diloco": {"compressor": "quantize:bits=4", "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
    "momentum": {"compressor": "topk:ratio=1/8,bits=4", "outer_momentum": 0.5, "decay": 0.9},
    "fragments": {"fragments": 3, "decay": 0.9},
    "overlapped": {"delay": 5},
    "five fragments of seven steps": {"every": 7, "fragments": 5, "delay": 1},
    "sharded": {"compressor": thinwire.Policy("topk:ratio=1/16,bits=2", overrides={"5.weight": "quantize:bits=8"})},
    "in host memory": {"offload": True},
}


def weights_of_all(results: list[Trained]) -> bool:
    return all(same_bits(results[0].weights, one.weights) for one in results[1:])


class TestARound:
    @pytest.mark.parametrize(
        ("options", "save_at"), list(zip(SETTINGS.values(), cycle((16, 19, 25)), strict=False)), ids=SETTINGS.keys()
    )
    def test_ranks_have_the_same_bits_when_it_ends_also_after_a_resume(
        self, options: dict[str, Any], save_at: int
    ) -> None:
        def rank(group: Any, whole: list[Trained] | None) -> Trained:
            state = None if whole is None else whole[group.rank].saved
            return train(group, 34, options, save_at=save_at, state=state, ends_together=True)

        whole = run_threads(rank, 3, None)
        assert weights_of_all(whole)
        assert all(same_bits(whole[0].buffers, one.buffers) for one in whole[1:])
        assert sum(whole[0].losses[-6:]) < sum(whole[0].losses[:6])
        for one, other in zip(whole, run_threads(rank, 3, whole), strict=True):
            assert same_bits(one.weights, other.weights)
            assert same_bits(one.buffers, other.buffers)
            assert one.losses[save_at:] == other.losses

    def test_the_mean_of_all_differences_and_an_outer_step_by_hand(self) -> None:
        """Two rounds of DiLoCo, dense: common weights by the formulas of the paper, from the local weights."""
        options = {"compressor": "none", "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True, "every": 3}

        def rank(group: Any) -> list[list[torch.Tensor]]:
            seen: list[list[torch.Tensor]] = []

            def before_step(model: nn.Module, optimizer: Any) -> None:
                if optimizer.steps % 3 == 0:
                    seen.append(copies(model.parameters()))
                if optimizer.steps % 3 == 2:  # the local step that ends the round
                    seen.append(after_local_step(model, optimizer))

            train(group, 7, options, before_step=before_step)
            return seen

        ranks = run_threads(rank, 2)
        common, momentum = ranks[0][0], [torch.zeros_like(p) for p in ranks[0][0]]
        for index in (1, 3):
            mean = [c - (a + b) / 2 for c, a, b in zip(common, ranks[0][index], ranks[1][index], strict=True)]
            momentum = [0.9 * m + d for m, d in zip(momentum, mean, strict=True)]
            common = [c - 0.7 * (d + 0.9 * m) for c, d, m in zip(common, mean, momentum, strict=True)]
            for mine, expected in zip(ranks[0][index + 1], common, strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("options", [{}, {"delay": 5}, {"fragments": 2, "delay": 4}])
    def test_what_was_done_is_applied_or_kept(self, options: dict[str, Any]) -> None:
        """All local movement = movement of the common weights + residuals + what was not sent yet, over all ranks."""

        def rank(group: Any) -> Any:
            moved: list[torch.Tensor] = []

            def before_step(model: nn.Module, optimizer: Any) -> None:
                after = after_local_step(model, optimizer)
                step = [p.detach().double() - b for p, b in zip(model.parameters(), after, strict=True)]
                moved[:] = step if not moved else [a + b for a, b in zip(moved, step, strict=True)]

            done = train(group, 37, options, before_step=before_step)
            names = [name for name, _ in network().named_parameters()]
            common = {n: t.double() for part in done.optimizer._parts for n, t in part.named(part.common).items()}
            residuals = done.optimizer.sync.residuals
            unsent = [
                common[n] - w.reshape(-1) + residuals.get(n, torch.zeros(()))
                for n, w in zip(names, done.weights, strict=True)
            ]
            under_way = done.optimizer._round
            assert under_way is None or not under_way.is_received
            return moved, [common[n] for n in names], unsent

        ranks = run_threads(rank, 2)
        for index, start in enumerate(network().parameters()):
            moved = sum(moved[index].reshape(-1) for moved, _, _ in ranks) / 2
            applied = start.detach().double().reshape(-1) - ranks[0][1][index]
            unsent = sum(unsent[index] for _, _, unsent in ranks) / 2
            torch.testing.assert_close(moved, applied + unsent, rtol=1e-4, atol=1e-5)

    def test_bytes_are_those_of_the_payloads(self) -> None:
        options = {"compressor": "topk:ratio=1/64,bits=2", "every": 4}
        (first, _) = run_threads(lambda group: train(group, 8, options), 2)
        model, topk = network(), thinwire.compressor("topk:ratio=1/64,bits=2")
        large = sum(p.numel() for p in model.parameters() if p.numel() >= 4096)
        gaps = sum(p.numel() for name, p in model.named_parameters() if name in ("0.bias", "1.weight", "1.bias"))
        small = sum(p.numel() for p in model.parameters() if p.numel() < 4096)
        eight = thinwire.compressor("quantize:bits=8")
        buffers = sum(b.numel() for b in model.buffers() if b.is_floating_point())
        round_ = topk.nbytes(large + gaps, torch.float32) + eight.nbytes(small, torch.float32) + 4 * buffers
        stats = first.optimizer.sync.stats
        assert stats.bytes_sent == 2 * round_
        everything = sum(p.numel() for p in model.parameters()) + buffers
        assert stats.bytes_dense == 8 * 4 * everything  # a ring of two ranks sends all of it, at each of 8 steps
        assert stats.reduction == stats.bytes_dense / stats.bytes_sent


class TestResume:
    @pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 2)])
    def test_another_number_of_ranks_after_a_round(self, before: int, after: int) -> None:
        saved = [one.saved for one in run_threads(lambda group: train(group, 16, {}, save_at=16), before)]
        loaded = run_threads(lambda group: train(group, 16, {}, state=saved), after)
        for name in saved[0]["thinwire"]["residuals"]:
            there = sum(state["thinwire"]["residuals"][name].double() for state in saved) / before
            here = sum(one.optimizer.sync.residuals.get(name, torch.zeros(1)).double() for one in loaded) / after
            torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-7)
        run_threads(lambda group: train(group, 24, {}, state=saved), after)

    def test_all_states_in_that_of_one_rank(self) -> None:
        def rank(group: Any) -> Any:
            done = train(group, 19, {})
            done.optimizer.consolidate_state_dict()
            return done.optimizer.state_dict(), done.weights

        results = run_threads(rank, 2)
        again = run_threads(lambda group: train(group, 19, {}, state=results[0][0]), 2)
        assert all(same_bits(one.weights, weights) for one, (_, weights) in zip(again, results, strict=True))

    def test_states_that_do_not_fit_are_refused(self) -> None:
        (saved,) = run_threads(lambda group: train(group, 8, {}, save_at=8).saved, 1)
        in_the_middle = [one.saved for one in run_threads(lambda group: train(group, 17, {}, save_at=17), 2)]
        wrong: list[tuple[int, dict[str, Any], Any, str]] = [
            (3, {}, in_the_middle, r"in the middle of a round.*synchronize"),
            (1, {"every": 4}, saved, "setting every 8, here it is 4"),
            (1, {}, adamw(network()).state_dict(), "no key 'thinwire'"),
            (1, {}, thinwire.AdamW(network()).state_dict(), r"of thinwire\.AdamW, expected thinwire\.LocalSteps"),
        ]
        for key in ("common", "weights", "local_steps", "setting"):
            lacking = {name: value for name, value in saved["thinwire"].items() if name != key}
            wrong.append((1, {}, {**saved, "thinwire": lacking}, f"'{key}' is missing"))
        inner = copy.deepcopy(saved["state"])
        inner[0][0]["exp_avg"] = inner[0][0]["exp_avg"].flatten()[:-1]
        wrong.append((1, {}, {**saved, "state": inner}, "exp_avg of parameter 0 has another form"))
        for ranks, options, state, message in wrong:
            with pytest.raises(ValueError, match=message):
                run_threads(lambda group, options=options, state=state: train(group, 24, options, state=state), ranks)
        with pytest.raises(ValueError, match="another model"):
            thinwire.LocalSteps(adamw(network()), 8).load_state_dict(saved)  # without the names of the model


def test_a_finite_difference_whose_sum_overflows_is_no_reason_to_leave_a_rank_out() -> None:
    assert is_finite(torch.full((4,), 2e38))
    assert not is_finite(torch.tensor([1.0, torch.inf]))
    assert not is_finite(torch.tensor([torch.nan, 1.0]))


@pytest.mark.parametrize(("options", "at"), [({"compressor": "none"}, 4), ({"fragments": 4, "delay": 2}, 9)], ids=str)
def test_the_difference_of_a_rank_that_is_not_finite_is_left_out(options: dict[str, Any], at: int) -> None:
    """And the rank recovers."""

    def before_step(model: nn.Module, optimizer: Any) -> None:
        if optimizer.steps == at and optimizer.sync.rank == 1:
            next(model.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]

    with pytest.warns(UserWarning, match=r"rank 1 are not finite after \d+ local steps.*left out"):
        found = run_threads(lambda group: train(group, 40, options, before_step=before_step, ends_together=True), 2)
    assert weights_of_all(found)
    assert all(bool(w.isfinite().all()) for w in found[0].weights)
    assert all(one.losses[-1] == one.losses[-1] for one in found)
    assert [one.optimizer.left_out > 0 for one in found] == [False, True]
    assert [one.optimizer.sync.stats.skipped for one in found] == [0, 0], "the others are averaged"
    for state in found[1].optimizer.optimizers[0].state.values():
        assert bool(state["exp_avg"].isfinite().all())


class TestAsAnOptimizer:
    def test_several_optimizers(self) -> None:
        def both(model: nn.Module) -> list[torch.optim.Optimizer]:
            matrices = [p for p in model.parameters() if p.ndim == 2]
            others = [p for p in model.parameters() if p.ndim != 2]
            return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]

        results = run_threads(lambda group: train(group, 24, {}, make=both), 2)
        assert weights_of_all(results)
        assert sum(results[0].losses[-6:]) < sum(results[0].losses[:6])

    def test_a_closure(self) -> None:
        model = network()
        optimizer = thinwire.LocalSteps(torch.optim.LBFGS(model.parameters(), max_iter=2), 2, model=model)

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, 0, 0)
            loss.backward()
            return loss.item()

        losses: Any = [optimizer.step(closure) for _ in range(4)]
        assert losses[-1] < losses[0]
        assert optimizer.rounds == 2

    def test_a_grad_scaler_that_skips_on_one_rank_skips_no_round(self) -> None:
        def rank(group: Any) -> Any:
            model = network()
            optimizer = thinwire.LocalSteps(adamw(model), 4, model=model, group=group)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
            for step in range(12):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, step, group.rank)).backward()
                if step == 3 and group.rank == 1:  # the last step of a round
                    next(model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
                scaler.step(optimizer)
                scaler.update()
            return copies(model.parameters()), optimizer.rounds, scaler.get_scale(), optimizer.left_out

        results = run_threads(rank, 2)
        assert same_bits(results[0][0], results[1][0])
        assert [rounds for _, rounds, _, _ in results] == [3, 3]
        assert [scale for _, _, scale, _ in results] == [1024.0, 512.0]
        assert [left_out for *_, left_out in results] == [0, 0]

    def test_weights_loaded_after_it_was_made_are_the_common_ones(self) -> None:
        def rank(group: Any, late: bool) -> list[torch.Tensor]:
            model, other = network(), {k: v + 1 for k, v in network().state_dict().items()}
            if not late:
                model.load_state_dict(other)
            optimizer = thinwire.LocalSteps(adamw(model), 4, model=model, group=group)
            if late:
                model.load_state_dict(other)
            for step in range(8):
                take(optimizer, loss_of(model, step, group.rank))
            return copies(model.parameters())

        assert same_bits(run_threads(rank, 2, True)[0], run_threads(rank, 2, False)[0])

    def test_sixteen_bits(self) -> None:
        def rank(group: Any) -> Any:
            model = nn.Linear(96, 96, bias=False, dtype=torch.bfloat16)
            with torch.no_grad():
                model.weight.fill_(0.01)
            optimizer = thinwire.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), 4, group=group)
            for step in range(8):
                generator = torch.Generator().manual_seed(step + 100 * group.rank)
                take(optimizer, model(torch.randn(8, 96, generator=generator).bfloat16()).square().sum())
            (part,) = optimizer._parts
            return model.weight.detach().clone(), part.common.clone()

        (mine, common), (theirs, _) = run_threads(rank, 2)
        assert torch.equal(mine, theirs)
        assert common.dtype == torch.float32
        assert torch.equal(mine.view(-1), common.bfloat16())

    def test_alone(self) -> None:
        """One process without torch.distributed trains as without it. Schedulers reach the inner optimizer."""
        model, plain = network(), network()
        optimizer, inner = thinwire.LocalSteps(sgd(model), 4, model=model), sgd(plain)
        schedulers = [torch.optim.lr_scheduler.LinearLR(by, 1.0, 0.5, total_iters=4) for by in (optimizer, inner)]
        for step in range(9):
            for one, by, scheduler in zip((model, plain), (optimizer, inner), schedulers, strict=True):
                take(by, loss_of(one, step, 0))
                scheduler.step()
        for each in (optimizer, *optimizer.optimizers):
            assert each.param_groups[0]["lr"] == pytest.approx(0.05)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class TestErrors:
    def test_settings(self) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"every": 0}, "every 0, expected a whole number, 1 or more"),
            ({"every": 2.0}, "every 2.0, expected a whole number"),
            ({"fragments": 9}, "fragments 9, expected at most 8"),
            ({"fragments": 2, "delay": 5}, "delay 5, expected at most 4"),
            ({"delay": -1}, "delay -1, expected a whole number, 0 or more"),
            ({"decay": 1.5}, "decay 1.5, expected a number from 0 to 1"),
            ({"outer_lr": -1.0}, "outer_lr -1.0, expected 0 or more"),
            ({"outer_momentum": 1.0}, "outer_momentum 1.0, expected 0 to below 1"),
            ({"nesterov": True}, "nesterov with outer_momentum 0"),
            ({"compressor": "auto"}, "compressor 'auto'"),
            ({"compressor": "topkk"}, "topkk"),
        ]
        for options, message in wrong:
            with pytest.raises(ValueError, match=message):
                thinwire.LocalSteps(adamw(network()), **{"every": 8, **options})

    def test_optimizers(self) -> None:
        model = network()
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            ("adamw", {}, "a str as optimizer"),
            (thinwire.AdamW(model), {}, r"thinwire\.AdamW inside LocalSteps.*give torch\.optim\.AdamW"),
            ([], {}, "an empty list"),
            ([adamw(model), adamw(model)], {}, "given to two optimizers"),
            (adamw(model), {"model": network()}, "no parameter of the model is in an optimizer"),
        ]
        for optimizers, options, message in wrong:
            with pytest.raises(ValueError, match=message):
                thinwire.LocalSteps(optimizers, 8, **options)
        with pytest.raises(ValueError, match="parameter groups cannot be added"):
            thinwire.LocalSteps(adamw(model), 8).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    def test_ranks_with_other_weights_or_settings(self) -> None:
        def apart(group: Any) -> None:
            def before_step(model: nn.Module, optimizer: Any) -> None:
                model.get_parameter("3.weight").data[0, 0] += group.rank

            train(group, 1, {}, before_step=before_step)

        with pytest.raises(ValueError, match=r"'3\.weight' differs between ranks"):
            run_threads(apart, 2)
        with pytest.raises(thinwire.MismatchError, match="compressor"):
            run_threads(lambda group: train(group, 8, {"compressor": f"quantize:bits={4 + 4 * group.rank}"}), 2)

    def test_after_an_exchange_that_failed_the_state_can_be_saved_and_training_goes_on(self) -> None:
        model = network()
        optimizer = thinwire.LocalSteps(adamw(model), 4, model=model)
        collect, failures = optimizer.sync.collect, [thinwire.PeerError("rank 1 is lost", [1])]

        def fail_once() -> Any:
            if failures:
                optimizer.sync.drop()
                raise failures.pop()
            return collect()

        optimizer.sync.collect = fail_once  # type: ignore[method-assign]
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            if step == 3:
                with pytest.raises(thinwire.PeerError):
                    optimizer.step()
                assert optimizer.state_dict()["thinwire"]["weights"] is not None
            else:
                optimizer.step()
        assert optimizer.rounds == 1
        assert optimizer.sync.stats.bytes_dense == 0  # alone, nothing is sent
