"""The models: their sizes, that they depend on the seed alone, and that they can learn."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.train.models import CNNConfig, GPTConfig, model_config

SMALL = GPTConfig(layers=1, width=32, heads=2, context=16)


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("bias", "vectors", "last"), [(1, 13, 2), (0, 2, 1)])
def test_a_gpt_has_the_parameters_that_it_should(bias: int, vectors: int, last: int) -> None:
    config = GPTConfig(layers=3, width=64, heads=4, context=32, bias=bias)
    block = 12 * 64 * 64 + vectors * 64  # four matrices' worth of attention, eight of the perceptron; biases and norms
    assert numel(config.build(0)) == 256 * 64 + 32 * 64 + 3 * block + last * 64


@pytest.mark.parametrize("config", [SMALL, CNNConfig(width=8)])
def test_weights_depend_on_the_seed_alone(config: GPTConfig | CNNConfig) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = config.build(7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = config.build(7).state_dict(), config.build(8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_gpt_starts_at_the_loss_of_a_guess() -> None:
    tokens = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(0))
    scores = SMALL.build(0)(tokens[:, :-1])
    assert scores.shape == (8, 16, 256)
    loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.1)


def test_a_gpt_does_not_look_ahead() -> None:
    model = SMALL.build(0)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 9] = 65
    same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same[:9].all()
    assert not same[9:].any()


def test_the_models_learn_a_batch_by_heart() -> None:
    generator = torch.Generator().manual_seed(0)
    images: tuple[Tensor, Tensor] = torch.randn(16, 1, 8, 8, generator=generator), torch.arange(16) % 10
    tokens = torch.randint(256, (4, 16), generator=generator)
    for model, (inputs, targets) in [(CNNConfig(8).build(0), images), (SMALL.build(0), (tokens, tokens.roll(-1, 1)))]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(60):
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.item() < 0.5, type(model).__name__


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: model_config("rnn:layers=2"), "model 'rnn' in 'rnn:layers=2' is unknown, expected one of gpt, cnn"),
        (lambda: model_config("gpt:depth=2"), "'depth=2' in 'gpt:depth=2', expected key=value with a whole number"),
        (lambda: model_config("gpt:layers"), "'layers' in 'gpt:layers', expected key=value"),
        (lambda: GPTConfig(width=130), "width 130 with 4 heads, expected a multiple of the heads"),
        (lambda: GPTConfig(layers=0), "layers 0, expected 1 or more"),
        (lambda: CNNConfig(size=10), "images of 10 pixels, expected a multiple of 4"),
        (lambda: CNNConfig(width=0), "width 0 and 10 classes"),
    ],
)
def test_sizes_that_cannot_be(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


def test_a_model_is_named_by_a_spec() -> None:
    assert model_config("gpt") == GPTConfig()
    assert model_config("cnn: width = 16, size=12") == CNNConfig(width=16, size=12)
