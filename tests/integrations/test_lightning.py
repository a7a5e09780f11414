"""Training by Lightning, started as its users start it: the same as a plain loop, bit for bit, also after a resume."""

import pytest

from support.frameworks.runs import Trained, trained_by


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_by("lightning", tmp_path_factory.mktemp("lightning") / "run")


def test_training_is_that_of_a_plain_loop(trained: Trained, plain: Trained) -> None:
    trained.assert_like_plain(plain)


def test_accumulation_and_bfloat16(trained: Trained) -> None:
    assert trained.result["accumulated_steps"] == 10, "one exchange for two batches"
    losses = trained.result["accumulated"]
    assert sum(losses[-4:]) < sum(losses[:4])
    trained.assert_same("accumulated")


def test_float16_with_a_grad_scaler(trained: Trained) -> None:
    """Steps are skipped on both ranks until the scale is small enough; without the scaler the first is an error."""
    result = trained.result
    assert result["skipped"] > 0
    assert result["scaled_steps"] == 20 - result["skipped"] > 5
    assert sum(result["scaled"][-4:]) < sum(result["scaled"][:4])
    trained.assert_same("scaled")
    assert "grad_scaler=scaler" in result["without_scaler"]


def test_clipping_by_lightning_is_refused(trained: Trained) -> None:
    assert "max_grad_norm=" in trained.result["clipped"]


def test_attach_exchanges_and_is_in_checkpoints(trained: Trained) -> None:
    assert trained.result["attached_bytes"] > 0
    trained.assert_same("attached")
    trained.assert_same("attached-resumed", as_name="attached")


def test_a_second_fit_goes_on_with_the_residuals_of_the_first(trained: Trained) -> None:
    """Also after a test with a checkpoint; another module starts anew, as do Lightning's optimizers."""
    assert trained.result["fitted_again"] == [10, 20, 30, 10]
    assert trained.result["ours_again"] == [10, 20]
