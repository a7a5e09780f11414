"""Numbers as people write them, and the refusal of what is none."""

import pytest

from thinwire.tools.plan.host import Host, parse_host
from thinwire.tools.plan.units import parse_count, parse_seconds, parse_share, show_bytes, show_rate, show_seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("2s", 2.0), ("150ms", 0.15), ("50 us", 5e-5), ("50µs", 5e-5), ("1e-3s", 1e-3), ("2min", 120)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds("--latency", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "2", "s", "-2s", "0s", "2 hours", "nan s", "inf s", "1e99s", "two s", "2s3"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"--latency .*, expected a time above 0 with its unit, such as 2s") as error:
        parse_seconds("--latency", text)
    assert repr(text) in str(error.value)


def test_a_latency_may_be_zero() -> None:
    assert parse_seconds("--latency", "0us", zero=True) == 0.0


@pytest.mark.parametrize(
    ("text", "count"), [("7e9", 7 * 10**9), ("350M", 350 * 10**6), ("7B", 7 * 10**9), ("12", 12), ("1.5k", 1500)]
)
def test_counts(text: str, count: int) -> None:
    assert parse_count("--params", text) == count


@pytest.mark.parametrize("text", ["", "0", "-7e9", "many", "1.5", "nan", "inf", "1e99", "7e9x", "0x10", "1__0"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number from 1"):
        parse_count("--params", text)


@pytest.mark.parametrize("text", ["-1%", "101%", "2", "some", "", "nan"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(ValueError, match="expected a share from 0 to 1"):
        parse_share("jitter", text)


def test_hosts() -> None:
    assert parse_host("") == Host()
    assert parse_host("ranks=8, cores=64,inside=300gbit") == Host(8, 64, 3e11)
    assert not parse_host("ranks=8").simulated
    assert parse_host("per_switch=32,oversubscription=4").simulated
    assert parse_host("jitter=5%").jitter == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus=8", "'gpus=8' in --host 'gpus=8', expected key=value with one of ranks, cores"),
        ("ranks", "ranks in --host '', expected a whole number"),
        ("ranks=0", "ranks in --host '0', expected a whole number from 1"),
        ("ranks=2,ranks=4", "says ranks twice"),
        ("inside=fast", "rate 'fast', expected one from 100kbit"),
        ("oversubscription=4", "add per_switch=32"),
        ("per_switch=4,oversubscription=0.5", "expected a number from 1 to 1000"),
        ("per_switch=4,oversubscription=x", "expected a number from 1 to 1000"),
    ],
)
def test_hosts_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"host|rate") as error:
        parse_host(text)
    assert message in str(error.value)


def test_numbers_for_a_person() -> None:
    assert [show_seconds(value) for value in (3e-6, 0.0021, 0.5, 12.345, 1234.5)] == [
        "3 µs", "2.1 ms", "500 ms", "12.3 s", "1,234 s",
    ]  # fmt: skip
    assert [show_bytes(value) for value in (0, 999, 123_456, 5e12)] == ["0", "999 B", "123 kB", "5 TB"]
    assert show_rate(5e5) == "500 kbit/s"
