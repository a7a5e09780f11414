"""docs/choosing.md: every command that it shows prints what it shows."""

import re
import shlex
from pathlib import Path

import pytest

from thinwire.tools import cli

PAGE = Path(__file__).parents[3] / "docs" / "choosing.md"
SHOWN = re.findall(r"^```console\n\$ thinwire (.*?)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("command", "lines"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_page_shows_what_is_printed(
    command: str, lines: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(shlex.split(command)) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in lines.splitlines():
        assert " ".join(line.split()) in printed, "\n".join(printed)


def test_there_is_something_shown() -> None:
    assert len(SHOWN) >= 4
