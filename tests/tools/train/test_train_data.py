"""The data: the same for everyone, and never the validation's."""

import pytest
import torch

from thinwire.tools.train.data import Batch, Data, Text, sources
from thinwire.tools.train.images import Digits


@pytest.fixture(scope="module", params=["text", "digits", "noisy digits"])
def data(request: pytest.FixtureRequest) -> Data:
    return Text(32) if request.param == "text" else Digits(0.5 if "noisy" in request.param else 0.0)


def stream(data: Data, start: int, steps: int, ranks: int, size: int) -> Batch:
    """What all ranks together see in these steps."""
    batches = [data.batch(start + part * size, size, seed=0) for part in range(steps * ranks)]
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def test_a_batch_is_a_function_of_its_arguments(data: Data) -> None:
    first, again = (data.batch(40, 8, seed=3) for _ in range(2))
    assert all(map(torch.equal, first, again))
    for start, seed in [(48, 3), (40, 4), (40 + data.length, 3)]:
        assert not torch.equal(first.inputs, data.batch(start, 8, seed).inputs)


def test_the_ranks_together_see_the_same_in_any_world(data: Data) -> None:
    """Over the border of an epoch too, in the middle of a batch."""
    for start in (216, data.length - 50):
        four, two, one = stream(data, start, 4, 4, 6), stream(data, start, 4, 2, 12), data.batch(start, 96, seed=0)
        assert all(map(torch.equal, four, two))
        assert all(map(torch.equal, four, one))


def test_the_validation_is_always_the_same(data: Data) -> None:
    whole = [torch.cat(parts) for parts in zip(*data.validation(50), strict=True)]
    again = [torch.cat(parts) for parts in zip(*data.validation(7), strict=True)]
    assert all(map(torch.equal, whole, again))
    assert len(whole[0]) in (256, 360, 3600)
    assert max(len(batch.targets) for batch in data.validation(50)) == 50


def test_an_epoch_of_text_is_all_of_it_once() -> None:
    text, context = Text(64), 64
    train = sources()[0]
    assert text.length == len(train) // context - 1
    for epoch in (0, 1):
        inputs, targets = text.batch(epoch * text.length, text.length, seed=0)
        first = train.index(bytes(inputs[0].tolist())) % context
        cut = train[first : first + text.length * context + 1]
        windows = sorted(bytes(window) for window in inputs.to(torch.uint8).numpy())
        assert windows == sorted(cut[at : at + context] for at in range(0, len(cut) - 1, context))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert (bytes(inputs[7].tolist()) + bytes([targets[7, -1]])) in cut


def test_epochs_of_text_begin_at_different_places() -> None:
    text, train = Text(64), sources()[0]
    windows = [text.batch(epoch * text.length, 1, seed=0).inputs[0] for epoch in range(6)]
    assert len({train.index(bytes(window.tolist())) % 64 for window in windows}) > 3


def test_every_digit_comes_once_in_an_epoch() -> None:
    digits = Digits()
    assert digits.length == 1437
    first, second = (digits.batch(epoch * 1437, 1437, seed=0) for epoch in range(2))
    for part in range(2):
        rows = [sorted(map(str, batch[part].view(1437, -1).tolist())) for batch in (first, second)]
        assert rows[0] == rows[1]
    validation = {str(image.tolist()) for batch in digits.validation(64) for image in batch.inputs}
    assert not validation & {str(image.tolist()) for image in first.inputs}


def test_noise_is_another_for_every_place() -> None:
    clean, noisy = (Digits(noise).batch(0, 1437, seed=1) for noise in (0.0, 0.5))
    noise = noisy.inputs - clean.inputs
    assert noise.std().item() == pytest.approx(0.5, abs=0.01)
    assert len({str(image.tolist()) for image in noise}) == 1437
    later = Digits(0.5).batch(1437, 1437, seed=1).inputs - Digits().batch(1437, 1437, seed=1).inputs
    assert (noise * later).mean().item() == pytest.approx(0, abs=0.01)
    draws = torch.cat([batch.inputs for batch in Digits(0.5).validation(360)]).view(10, 360, -1)
    assert (draws[0] - draws[1]).std().item() == pytest.approx(0.5**0.5, abs=0.02)


def test_the_target_is_the_next_byte() -> None:
    inputs, targets = Text(32).batch(0, 4, seed=0)
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
    inputs, targets = Digits().batch(0, 100, seed=0)
    assert inputs.shape == (100, *Digits.inputs) == (100, 1, 8, 8)
    assert (float(inputs.min()), float(inputs.max())) == (0.0, 1.0)
    assert set(targets.tolist()) == set(range(Digits.classes))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="context 1000000000, but there are only"):
        Text(1_000_000_000)
