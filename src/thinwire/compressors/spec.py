"""Spec strings of the form `name:key=value,...`, and the registry of compressors.

The same text is used for command-line options, benchmark columns, plot labels, frame headers and checkpoints.
`parse_spec(format_spec(c)) == c` for every compressor. `format_spec` writes every field, so that a stored spec keeps
its meaning when a default changes.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Protocol, TypeVar


class Named(Protocol):
    """An object of a registered class: a `Compressor`, which this module cannot import."""

    name: ClassVar[str]


REGISTRY: dict[str, type[Named]] = {}  # Registered compressor classes by name

C = TypeVar("C", bound=Named)

ROUNDING_WENT = "leave it out: stochastic rounding was removed, and a residual keeps what rounding to nearest loses"
"""The advice in errors for the option `rounding`."""

Ratio = Fraction | float | str
"""A share as the user writes it, such as 0.01, "1%" or "1/64". `parse_ratio` converts it to an exact fraction."""


def register_compressor(name: str) -> Callable[[type[C]], type[C]]:
    """Return a class decorator that registers a compressor under `name`.

    Spec strings, the contract tests and the benchmark find the compressor by this name.
    """

    def add(cls: type[C]) -> type[C]:
        if not (name.isascii() and name.isidentifier() and name == name.lower()):
            raise ValueError(f"compressor name {name!r}, expected lower-case letters, digits and underscores")
        if REGISTRY.get(name, cls) is not cls:
            raise ValueError(f"compressor name {name!r} is taken by {REGISTRY[name].__qualname__}")
        params = getattr(cls, "__dataclass_params__", None)
        if params is None or not params.frozen or not params.eq:
            raise TypeError(f"{cls.__qualname__} must be a frozen dataclass to be registered")
        for field in _fields(cls):
            if field.type not in _FIELD_TYPES:
                expected = list(_FIELD_TYPES)
                raise TypeError(f"{cls.__qualname__}.{field.name}: type {field.type!r}, expected one of {expected}")
        cls.name = name
        REGISTRY[name] = cls
        return cls

    return add


def parse_spec(spec: str) -> Named:
    """Return the compressor that a spec string describes. Raises ValueError, with the reason, for an invalid string."""
    name, colon, rest = spec.partition(":")
    cls = REGISTRY.get(name)
    if cls is None:
        raise ValueError(f"compressor {name!r} in {spec!r} is unknown; known are {', '.join(sorted(REGISTRY))}")
    fields = {field.name: field for field in _fields(cls)}
    values: dict[str, Any] = {}
    for item in rest.split(",") if colon else []:
        key, equals, text = item.partition("=")
        if key == "rounding":
            raise ValueError(f"{item!r} in {spec!r}: {ROUNDING_WENT}")
        if not equals or key not in fields:
            known = ", ".join(fields) or "none"
            raise ValueError(
                f"{item!r} in {spec!r} is not an option of {name}; expected key=value with a key of: {known}"
            )
        if key in values:
            raise ValueError(f"{key!r} is given twice in {spec!r}")
        parse, expected = _FIELD_TYPES[fields[key].type]
        try:
            values[key] = parse(text)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"{key}={text!r} in {spec!r}, expected {expected}") from None
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if missing:
        raise ValueError(f"{spec!r} lacks {', '.join(missing)}; for example {name}:{missing[0]}=1/64")
    return cls(**values)


def format_spec(compressor: Named) -> str:
    """Return the canonical spec string of a compressor, with every field."""
    items = [f"{field.name}={_format(getattr(compressor, field.name))}" for field in _fields(type(compressor))]
    return str(compressor.name) + (":" + ",".join(items) if items else "")


def parse_ratio(value: Ratio) -> Fraction:
    """Convert 0.01, "0.01", "1%" or "1/64" to the exact fraction. Raises ValueError unless it is in (0, 1]."""
    text = str(value).strip()
    number = text.removesuffix("%")
    try:
        if "/" not in number and not 0 < float(number) <= 100:  # 1e-999999999 would never become a fraction
            raise ValueError
        ratio = Fraction(number) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        ratio = Fraction(0)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio {value!r}, expected a share above 0 and up to 1, such as 0.01, '1%' or '1/64'")
    return ratio


def check_choice(name: str, value: object, choices: Sequence[int | str | None]) -> None:
    """Raise ValueError unless `value` is one of `choices` and of the same type (neither True nor 1.0 counts as 1)."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name} {value!r}, expected one of {', '.join(map(_format, choices))}")


def check_seed(seed: int) -> None:
    """Raise ValueError unless `seed` is an int from 0 to 2**64 - 1."""
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed {seed!r}, expected a whole number from 0 to 2**64 - 1")


def mix_key(seed: int, key: int) -> int:
    """Mix a seed and a key into one 64-bit number (splitmix64). Neighbouring seeds or keys give unrelated numbers."""
    z = 0
    for word in (seed, operator.index(key)):
        z = (z + word + 0x9E3779B97F4A7C15) % (1 << 64)
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ z >> 27) * 0x94D049BB133111EB % (1 << 64)
        z ^= z >> 31
    return z


def _fields(cls: type[Any]) -> list[Any]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _format(value: object) -> str:
    if isinstance(value, Fraction):  # the shorter of 1/64 and 0.015625, as a person would write it
        decimal = repr(float(value))
        return min(str(value), decimal, key=len) if Fraction(decimal) == value else str(value)
    return "none" if value is None else str(value)


def _parse_int(text: str) -> int:
    if not text.isascii() or not text.removeprefix("-").isdigit():
        raise ValueError(text)
    return int(text)


_FIELD_TYPES: dict[Any, tuple[Callable[[str], Any], str]] = {
    Ratio: (parse_ratio, "a share above 0 and up to 1, such as 0.01, 1% or 1/64"),
    int: (_parse_int, "a whole number"),
    int | None: (lambda text: None if text == "none" else _parse_int(text), "a whole number or none"),
    str: (str, "a word"),
}
"""For each type that a field may have: the function that parses its text, and a description of that text."""
