"""Training by Accelerate, started as its users start it: the same as a plain loop, bit for bit, also after a resume."""

import pytest

from support.frameworks.runs import Trained, trained_by


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_by("accelerate", tmp_path_factory.mktemp("accelerate") / "run")


def test_training_is_that_of_a_plain_loop(trained: Trained, plain: Trained) -> None:
    trained.assert_like_plain(plain)


def test_accumulation_and_bfloat16(trained: Trained) -> None:
    assert trained.result["accumulated_steps"] == 10, "one exchange for two batches"
    trained.assert_same("accumulated")


def test_clipping_by_accelerate_is_refused(trained: Trained) -> None:
    assert "max_grad_norm=" in trained.result["clipped"]
