"""The data: the same for everyone, and never the validation's."""

import pytest
import torch

from thinwire.train.data import Data, Digits, Text, sources


@pytest.fixture(scope="module", params=["text", "digits"])
def data(request: pytest.FixtureRequest) -> Data:
    return Text(32) if request.param == "text" else Digits()


def test_a_batch_is_a_function_of_its_arguments(data: Data) -> None:
    first, again = (data.batch(5, 1, 4, seed=3, size=8) for _ in range(2))
    assert all(map(torch.equal, first, again))
    for other in [(6, 1, 4, 3), (5, 2, 4, 3), (5, 1, 4, 4)]:
        assert not torch.equal(first.inputs, data.batch(*other, size=8).inputs)


def test_the_ranks_together_see_the_same_in_any_world(data: Data) -> None:
    four = torch.cat([data.batch(9, rank, 4, seed=0, size=6).inputs for rank in range(4)])
    two = torch.cat([data.batch(9, rank, 2, seed=0, size=12).inputs for rank in range(2)])
    assert torch.equal(four, two)


def test_the_validation_is_always_the_same(data: Data) -> None:
    whole = [torch.cat(parts) for parts in zip(*data.validation(50), strict=True)]
    again = [torch.cat(parts) for parts in zip(*data.validation(7), strict=True)]
    assert all(map(torch.equal, whole, again))
    assert len(whole[0]) in (256, 360)


def test_the_target_is_the_next_byte() -> None:
    inputs, targets = Text(32).batch(0, 0, 1, seed=0, size=4)
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    train, validation = sources()
    assert bytes(inputs[0].tolist()) in train
    last = list(Text(32).validation(100))[-1]
    assert bytes(last.targets[-1].tolist()) == validation[-32:]


def test_the_text_is_python() -> None:
    train, validation = sources()
    assert b"def __init__(self" in train
    assert b"def " in validation
    assert len(train) > 8 * len(validation) > 1_000_000


def test_digits_are_small_numbers() -> None:
    inputs, targets = Digits().batch(0, 0, 1, seed=0, size=100)
    assert inputs.shape == (100, 1, 8, 8)
    assert (float(inputs.min()), float(inputs.max())) == (0.0, 1.0)
    assert set(targets.tolist()) == set(range(10))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="context 1000000000, but there are only"):
        Text(1_000_000_000)
    with pytest.raises(ValueError, match="rank 2 of 2, expected 0 to 1"):
        Text(8).batch(0, 2, 2, 0, 4)
