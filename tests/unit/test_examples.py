"""The examples and the README's code run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_file(path: Path) -> str:
    """Standard output of a script; its exit code must be 0 and it may not warn."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-W", "error::FutureWarning", str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # two workers share what cores there are
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_reduce_example_counts_the_bytes() -> None:
    """The kernel's own counter of the loopback interface must see 190 times fewer bytes than a dense all-reduce."""
    output = run_file(ROOT / "examples" / "all_reduce.py")
    assert re.search(r"replicas identical +True", output), output
    if Path("/proc/net/dev").exists():
        times_less = re.search(r"(\d+) times less", output)
        assert times_less, output
        assert 190 <= int(times_less[1]) <= 196, output


def test_examples_are_short() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, f"{path.name} is too long for an example"


def test_code_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks, "README.md has no Python code"
    for block in blocks:
        script = tmp_path / "readme.py"
        script.write_text(block)
        assert "bytes instead of 4000000" in run_file(script)
