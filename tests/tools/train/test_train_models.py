"""The models: their sizes, that they depend on the seed alone, and that they can learn."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from thinwire.tools.train.models import CONFIGS, CNNConfig, GPTConfig, ResNet18Config, model_config

SMALL = GPTConfig(layers=1, width=32, heads=2, context=16)


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_gpt_has_the_parameters_that_it_should() -> None:
    for bias, vectors, last in ((1, 13, 2), (0, 2, 1)):
        config = GPTConfig(layers=3, width=64, heads=4, context=32, bias=bias)
        block = 12 * 64 * 64 + vectors * 64  # four matrices' worth of attention, eight of the perceptron; biases, norms
        assert numel(config.build(0)) == 256 * 64 + 32 * 64 + 3 * block + last * 64, bias


def test_weights_depend_on_the_seed_alone() -> None:
    for config in (SMALL, CNNConfig(width=8), ResNet18Config(width=4)):
        torch.manual_seed(1)
        state = torch.get_rng_state()
        first = config.build(7).state_dict()
        assert torch.equal(torch.get_rng_state(), state), config.name
        torch.manual_seed(2)
        again, other = config.build(7).state_dict(), config.build(8).state_dict()
        assert all(torch.equal(first[name], again[name]) for name in first), config.name
        assert all(tensor.isfinite().all() for tensor in first.values()), config.name
        averages = [(name.rpartition("_")[2], tensor) for name, tensor in first.items() if "running" in name]
        assert all((tensor == (kind == "var")).all() for kind, tensor in averages), "memory that is not filled"
        assert any(not torch.equal(first[name], other[name]) for name in first), config.name


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


def test_a_resnet_has_the_parameters_that_it_should() -> None:
    model = ResNet18Config().build(0)
    assert numel(model) == 11_173_962
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 20  # 17, and 3 of the skips
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert model.stages(model.stem(torch.zeros(1, 3, 32, 32))).shape == (1, 512, 4, 4)
    assert ResNet18Config(width=8, classes=7).build(0)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_a_cnn_for_other_images() -> None:
    for channels, size in ((1, 28), (3, 32), (1, 8)):
        config = model_config(f"cnn:width=4,channels={channels},size={size}")
        assert config.inputs == (channels, size, size)
        assert config.build(0)(torch.zeros(2, *config.inputs)).shape == (2, 10)


def test_the_models_learn_a_batch_by_heart() -> None:
    generator = torch.Generator().manual_seed(0)
    grey, coloured = (torch.randn(16, *shape, generator=generator) for shape in ((1, 8, 8), (3, 32, 32)))
    tokens, kinds = torch.randint(256, (4, 16), generator=generator), torch.arange(16) % 10
    cases = ((CNNConfig(8), grey, kinds), (ResNet18Config(8), coloured, kinds), (SMALL, tokens, tokens.roll(-1, 1)))
    for config, inputs, targets in cases:
        model = config.build(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(15 if config.name == "resnet18" else 60):
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert all(parameter.grad is not None for parameter in model.parameters())
        assert loss.item() < 0.5, config.name


def test_sizes_that_cannot_be_are_named() -> None:
    for spec, message in (
        ("rnn:layers=2", "model 'rnn' in 'rnn:layers=2' is unknown, expected one of gpt, cnn, resnet18"),
        ("gpt:depth=2", "'depth=2' in 'gpt:depth=2', expected key=value with one of layers, width, "),
        ("gpt:layers", "'layers' in 'gpt:layers', expected key=value"),
        ("gpt:layers=0", "'layers=0' in 'gpt:layers=0', expected .* a whole number from 1 to 999,999"),
        ("cnn:width=1000000000", "'width=1000000000' .* whole number from 1 to 999,999"),
        ("resnet18:size=64", "'size=64' in 'resnet18:size=64', expected key=value with one of width, classes"),
        ("gpt:width=130", "width 130 with 4 heads, expected a multiple of the heads"),
    ):
        with pytest.raises(ValueError, match=message):
            model_config(spec)


def test_a_model_is_named_by_a_spec() -> None:
    assert model_config("gpt") == GPTConfig()
    assert model_config("cnn: width = 16, size=12") == CNNConfig(width=16, size=12)
    assert model_config("resnet18:width=64,classes=10") == ResNet18Config()
    assert all(model_config(name).name == name for name in CONFIGS)
