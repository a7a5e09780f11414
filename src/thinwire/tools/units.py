"""Parse and format numbers with units, such as 7e9, 2s or 1Gbps. This module imports nothing large."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0}
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_NUMBER = r"([-+]?(?:\d+(?:_\d+)*)(?:\.\d+)?(?:e[-+]?\d+)?)"
SLOWEST, FASTEST = 1e5, 1e12  # Bits per second that a link may have
LONGEST_ROUND_TRIP = 2.0  # Seconds. A satellite has 0.6


class LinkSpeed(NamedTuple):
    """What a link does to bytes."""

    rate: float  # Bits per second, in each direction
    round_trip: float = 0.0
    """Seconds from sending a message to an answer that is sent at once. Half of it passes in each direction."""


def parse_seconds(option: str, text: str, *, zero: bool = False) -> float:
    """Parse a time above 0, in seconds; with `zero`, 0 is valid too.

    >>> parse_seconds("--latency", "250ms"), parse_seconds("--step-compute", "1.5 s")
    (0.25, 1.5)
    """
    match = re.fullmatch(rf"{_NUMBER}\s*(s|ms|us|µs|min)", text.strip().lower())
    value = float(match[1]) * _SECONDS[match[2]] if match else math.nan
    if not (value >= 0 if zero else value > 0) or value > 1e6:
        least = "0 or more" if zero else "above 0"
        raise ValueError(f"{option} {text!r}, expected a time {least} with its unit, such as 2s, 150ms or 50us")
    return value


def parse_count(option: str, text: str, largest: float = 1e13) -> int:
    """Parse a whole number from 1 to `largest`.

    >>> parse_count("--params", "7e9"), parse_count("--params", "350M"), parse_count("--params", "1_000")
    (7000000000, 350000000, 1000)
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([kmgbt]?)", text.strip().lower())
    number, scale = (match[1].replace("_", ""), _SCALES[match[2]]) if match else ("nan", 1.0)
    # First as a float, because a huge Decimal cannot be multiplied; then exactly, because 1.001k is whole.
    if not 1 <= float(number) * scale <= largest or (value := Decimal(number) * Decimal(scale)) % 1:
        raise ValueError(f"{option} {text!r}, expected a whole number from 1 to {largest:g}, such as 7e9, 350M or 7B")
    return int(value)


def parse_bytes(option: str, text: str) -> int:
    """Parse a size in bytes.

    >>> parse_bytes("--gpu-memory", "80GB"), parse_bytes("--gpu-memory", "16 GiB")
    (80000000000, 17179869184)
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([kmgt]?)(i?)b", text.strip().lower())
    value = math.nan
    if match:
        value = float(match[1]) * (1024.0 ** " kmgt".index(match[2] or " ") if match[3] else _SCALES[match[2]])
    if not 1 <= value <= 1e15:
        raise ValueError(f"{option} {text!r}, expected bytes with their unit, such as 80GB or 16GiB")
    return round(value)


def parse_rate(text: str) -> float:
    """Parse the rate of a link, in bits per second. Without a unit, or with k, M or G alone, it is in bits too.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit"), parse_rate("1Gbps"), parse_rate("100M"), parse_rate("1 Gbit/s")
    (100000000.0, 2500000000.0, 1000000000.0, 100000000.0, 1000000000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*([kmgt]?)(bit|bits|bps|bit/s|b/s|)", text.strip().lower())
    given_bytes = re.search(r"[kmgt]?B(/s|ps)\s*$", text) is not None
    if match is None or given_bytes or not SLOWEST <= (rate := float(match[1]) * _SCALES[match[2]]) <= FASTEST:
        raise ValueError(
            f"rate {text!r}, expected bits per second from 100kbit to 1000gbit, such as 100mbit, 2.5gbit or 1Gbps"
        )
    return rate


def parse_link(text: str) -> LinkSpeed:
    """Parse the rate of a link, and behind a comma its round-trip time, which is 0 if it is left out.

    >>> parse_link("100mbit,100ms"), parse_link("1gbit")
    (LinkSpeed(rate=100000000.0, round_trip=0.1), LinkSpeed(rate=1000000000.0, round_trip=0.0))
    """
    rate, comma, round_trip = text.partition(",")
    speed = LinkSpeed(parse_rate(rate))
    if not comma:
        return speed
    try:
        speed = speed._replace(round_trip=parse_seconds("", round_trip))
    except ValueError:
        speed = speed._replace(round_trip=math.inf)
    if speed.round_trip > LONGEST_ROUND_TRIP:
        raise ValueError(
            f"link {text!r}, expected a rate, or a rate and a round-trip time above 0 and up to "
            f"{LONGEST_ROUND_TRIP:g}s, such as 100mbit,100ms"
        )
    return speed


def format_number(value: float, digits: int = 2) -> str:
    """Format a number, rounded to so many digits. A prediction has no more than two.

    >>> [format_number(value) for value in (0.0213, 1, 6.12, 99.6, 1650, 0)]
    ['0.021', '1.0', '6.1', '100', '1,600', '0']
    """
    rounded = float(f"{value:.{digits}g}")
    if not rounded:
        return "0"
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def format_seconds(value: float, digits: int = 2) -> str:
    """Format a time.

    >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(451.0), format_seconds(5e-05)
    ('12 ms', '2.5 s', '450 s', '50 µs')
    >>> format_seconds(0.405, digits=3)
    '405 ms'
    """
    return _in_unit(value, digits, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def format_bytes(value: float, digits: int = 2) -> str:
    """Format a number of bytes.

    >>> format_bytes(0), format_bytes(512), format_bytes(1.54e6), format_bytes(28e9), format_bytes(999.9e6)
    ('0', '510 B', '1.5 MB', '28 GB', '1 GB')
    """
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
    return _in_unit(value, digits, units) if value else "0"


def _in_unit(value: float, digits: int, units: Sequence[tuple[float, str]]) -> str:
    """Format a value in the largest unit of which there is at least one, after rounding."""
    rounded = float(f"{value:.{digits}g}")
    size, unit = next((each for each in units if rounded >= each[0]), units[-1])
    text = format_number(value / size, digits)
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def format_count(value: float, unit: str = "") -> str:
    """Format a count.

    >>> format_count(7e9), format_count(7371840), format_count(512)
    ('7 G', '7.37 M', '512')
    """
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:g} {unit}".rstrip()


def format_rate(bits: float) -> str:
    """Format a rate in bits per second.

    >>> format_rate(1e9), format_rate(2.5e8)
    ('1 Gbit/s', '250 Mbit/s')
    """
    return format_count(bits, "bit/s")
