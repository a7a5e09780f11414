"""Small models: a byte-level GPT, a CNN and a ResNet for small images; each is named by a spec, like compressors.

Weights depend only on the seed, not on torch's global generator: so ranks and threads have the same bits.
"""

from dataclasses import fields

from .cnn import CNNConfig
from .gpt import VOCABULARY, GPTConfig
from .resnet import ResNet18Config

__all__ = ["CONFIGS", "VOCABULARY", "CNNConfig", "GPTConfig", "ModelConfig", "ResNet18Config", "model_config"]

ModelConfig = GPTConfig | CNNConfig | ResNet18Config
CONFIGS: dict[str, type[ModelConfig]] = {config.name: config for config in (GPTConfig, CNNConfig, ResNet18Config)}


def model_config(spec: str) -> ModelConfig:
    """Return the config of a model from its spec, name:key=value,...; a key that is not given has its default.

    >>> model_config("gpt:layers=4,width=256")
    GPTConfig(layers=4, width=256, heads=4, context=64, bias=0)
    """
    name, _, rest = spec.partition(":")
    if name not in CONFIGS:
        raise ValueError(f"model {name!r} in {spec!r} is unknown, expected one of {', '.join(CONFIGS)}")
    known = [field.name for field in fields(CONFIGS[name])]
    options = {}
    for part in rest.split(",") if rest else []:
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not value.isdecimal():
            raise ValueError(
                f"{part!r} in {spec!r}, expected key=value with a whole number and one of {', '.join(known)}"
            )
        options[key] = int(value)
    return CONFIGS[name](**options)
