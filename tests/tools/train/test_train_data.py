"""Data: samples and draws depend on seed and position alone, and training never sees those of the validation."""

import lzma
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from thinwire.tools.train.data import Batch, Text, below, file_parts, numbers, order, sources
from thinwire.tools.train.images import Data, Images, load_data


@pytest.fixture(scope="module", params=["text", "digits"])
def data(request: pytest.FixtureRequest) -> Data:
    return Text(32) if request.param == "text" else Images("digits")


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
    assert len(whole[0]) in (256, 360)
    assert max(len(batch.targets) for batch in data.validation(50)) == 50


def test_an_epoch_of_text_is_all_of_it_once() -> None:
    text, context = Text(64), 64
    train = sources()[0]
    assert text.length == len(train) // context - 1
    begins = []
    for epoch in (0, 1):
        inputs, targets = text.batch(epoch * text.length, text.length, seed=0)
        first = train.index(bytes(inputs[0].tolist())) % context
        begins.append(first)
        cut = train[first : first + text.length * context + 1]
        windows = sorted(bytes(window) for window in inputs.to(torch.uint8).numpy())
        assert windows == sorted(cut[at : at + context] for at in range(0, len(cut) - 1, context))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert (bytes(inputs[7].tolist()) + bytes([targets[7, -1]])) in cut
    assert begins[0] != begins[1]


def test_no_digit_of_the_validation_is_trained_on() -> None:
    digits = Images("digits")
    assert digits.length == 1437
    validation = {str(image.tolist()) for batch in digits.validation(64) for image in batch.inputs}
    assert not validation & {str(image.tolist()) for image in digits.batch(0, 1437, seed=0).inputs}


# A file as a text ----------------------------------------------------------------------------------------------------

TEXT = bytes(range(256)) * 100


def test_a_file_is_a_text(tmp_path: Path) -> None:
    for suffix, pack in ((".txt", bytes), (".xz", lzma.compress)):
        path = tmp_path / f"text{suffix}"
        path.write_bytes(pack(TEXT))
        train, validation = file_parts(path)
        assert train + validation == TEXT, suffix
        assert len(validation) == len(TEXT) // 20
        inputs, targets = load_data("text", path, 16).batch(0, 4, seed=0)
        assert torch.equal((inputs + 1) % 256, targets), "each byte is one more than the last"
    assert load_data("text", tmp_path, 16).length == Text(16).length, "a folder leaves the text as it is"


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(TEXT[:100])
    for context, file in ((16, tmp_path / "short.txt"), (1_000_000_000, None)):
        with pytest.raises(ValueError, match=f"context {context}, expected 1 to half of the .* bytes of text"):
            Text(context, file=file)


# Draws ---------------------------------------------------------------------------------------------------------------


def test_pieces_of_the_stream_fit_together() -> None:
    epochs = order(3, 50, 0, 250).split(50)
    assert all(sorted(epoch.tolist()) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 5
    for length, sizes in ((1, (5, 8)), (7, (30, 2, 100)), (64, (1,)), (64, (5, 8))):
        whole, start = order(0, length, 0, 400), 0
        while start < 300:
            for size in sizes:
                assert torch.equal(order(0, length, start, size), whole[start : start + size]), (length, start, size)
                start += size


def test_numbers_are_those_of_splitmix64() -> None:
    """In whole numbers without a limit, as the paper has them."""
    whole, golden = 1 << 64, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % whole
        z = (z ^ z >> 27) * 0x94D049BB133111EB % whole
        return z ^ z >> 31

    places = [0, 1, 5, 10**9, 2**40 + 3, 2**62]
    for seed, what in ((0, "noise"), (7, "shift"), (2**64, "noise")):
        key = int.from_bytes(blake2b(f"{what}/{seed}".encode(), digest_size=8).digest(), "big")
        rows = [mix(key ^ place * golden % whole) for place in places]
        expected = [[mix((row + column * golden) % whole) >> 32 for column in range(1, 6)] for row in rows]
        assert numbers(seed, what, torch.tensor(places), 5).tolist() == expected


def test_numbers_are_spread_evenly() -> None:
    places = torch.arange(20_000)
    counts = below(9, 0, "shift", places, 2).flatten().bincount(minlength=9)
    assert len(counts) == 9
    assert (counts / 40_000 - 1 / 9).abs().max() < 0.01
