"""What every command of thinwire holds to."""

import pytest

from support.processes import run_python
from thinwire.tools import cli


def assert_refused(command: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage exits with 2 and one line on stderr, which has the message."""
    assert cli.main([*command.split(), *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith(f"thinwire {command}: error: ")
    assert message in output.err


def assert_help_loads_no_torch(command: str) -> None:
    """--help must come at once."""
    script = (
        "import sys\n"
        "from thinwire.tools.cli import main\n"
        "try:\n"
        f"    main([*{command.split()!r}, '--help'])\n"
        "finally:\n"
        "    print('loaded:', [name for name in ('torch', 'numba', 'numpy') if name in sys.modules])\n"
    )
    assert run_python(script).endswith("loaded: []")
