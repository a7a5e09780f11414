"""Numbers as people write them, and the refusal of what is none."""

import pytest

from thinwire.tools.units import (
    parse_bytes,
    parse_count,
    parse_link,
    parse_rate,
    parse_seconds,
)


def test_times() -> None:
    for text, seconds in {
        "2s": 2.0, "150ms": 0.15, "50 us": 5e-5, "50µs": 5e-5, "1e-3s": 1e-3, "2min": 120.0,
    }.items():  # fmt: skip
        assert parse_seconds("--latency", text) == pytest.approx(seconds), text
    assert parse_seconds("--latency", "0us", zero=True) == 0.0
    for text in ("", "2", "s", "-2s", "0s", "2 hours", "nan s", "inf s", "1e99s", "two s", "2s3"):
        with pytest.raises(ValueError, match=r"--latency .*, expected a time above 0 with its unit") as error:
            parse_seconds("--latency", text)
        assert repr(text) in str(error.value)


def test_counts() -> None:
    for text, count in {"7e9": 7 * 10**9, "350M": 350 * 10**6, "7B": 7 * 10**9, "12": 12, "1.5k": 1500}.items():
        assert parse_count("--params", text) == count, text
    for text in ("", "0", "-7e9", "many", "1.5", "nan", "inf", "1e99", "7e9x", "0x10", "1__0"):
        with pytest.raises(ValueError, match=f"--params {text!r}, expected a whole number from 1"):
            parse_count("--params", text)


def test_rates() -> None:
    """Bytes per second are refused: eight times the rate would be a different plan."""
    for text, rate in {
        "1gbit": 1e9, "1Gbps": 1e9, "1 Gbit/s": 1e9, "1Gb/s": 1e9, "100M": 1e8, "100mbit": 1e8, "1gbit/s": 1e9,
        "2.5gbit": 2.5e9, "54Mbps": 54e6, "1e9": 1e9, "0.1G": 1e8,
    }.items():  # fmt: skip
        assert parse_rate(text) == pytest.approx(rate), text
    for text in ("", "fast", "1", "-1gbit", "0gbit", "1e99gbit", "1GB/s", "125MBps", "nan", "1 parsec"):
        with pytest.raises(ValueError, match=f"rate {text!r}, expected bits per second from 100kbit to 1000gbit"):
            parse_rate(text)


def test_sizes() -> None:
    for text, size in {"80GB": 80 * 10**9, "16GiB": 16 << 30, "512 mb": 512 * 10**6}.items():
        assert parse_bytes("--gpu-memory", text) == size, text
    for text in ("", "80", "GB", "-1GB", "0GB", "1e99GB", "much"):
        with pytest.raises(ValueError, match=f"--gpu-memory {text!r}, expected bytes with their unit, such as 80GB"):
            parse_bytes("--gpu-memory", text)


def test_links_have_a_rate_and_may_have_a_round_trip_time() -> None:
    for text, speed in {
        "100mbit": (1e8, 0.0), "100mbit,100ms": (1e8, 0.1), "1 Gbps, 0.5 s": (1e9, 0.5), "1gbit,50us": (1e9, 5e-5),
    }.items():  # fmt: skip
        assert parse_link(text) == pytest.approx(speed), text
    for text in ("100mbit,", "100mbit,0ms", "100mbit,-5ms", "100mbit,100", "100mbit,3s", "1gbit,1ms,2"):
        with pytest.raises(
            ValueError, match=f"link {text!r}, expected a rate, or a rate and a round-trip time above 0"
        ):
            parse_link(text)
    for text in ("fast,100ms", ",100ms", "100ms"):
        with pytest.raises(ValueError, match="expected bits per second"):
            parse_link(text)
