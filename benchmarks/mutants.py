"""Plants the mistakes of mutants.toml in a copy of the library, one at a time, and runs the tests that should see each.

    python benchmarks/mutants.py                 # all of them, after a run of the same tests without a mistake
    python benchmarks/mutants.py --only 3 17     # some of them, by number
    python benchmarks/mutants.py --only adamw    # or by a part of the file's name

A mistake is killed if a test fails or does not end in time. It survives if all of its tests pass. It is invalid if the
tests cannot be collected. The exit status is 1 unless all are killed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
LIBRARY = ROOT / "src" / "thinwire"
TIMEOUT_SECONDS = 300.0
"""For the tests of one mistake."""
TESTS_FAILED, ALL_PASSED = 1, 0
"""Exit statuses of pytest; others mean that it could not run the tests."""


@dataclass(frozen=True)
class Mutant:
    """A planted mistake."""

    number: int
    file: str
    """Path in src/thinwire."""
    mistake: str
    old: str
    """Text of the file, which occurs once in it."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids of tests that should see the mistake, in the order in which they run."""
    was_missed: bool = False
    """Whether the tests did not see this mistake before they were extended for it."""

    def mutated(self) -> str:
        """Return the text of the file with the mistake; raise ValueError if `old` does not occur exactly once."""
        text = (LIBRARY / self.file).read_text()
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"mutant {self.number}: its old text occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """Return all mutants of the list, numbered from 1."""
    entries = tomllib.loads(LIST.read_text())["mutant"]
    return [
        Mutant(number=number, **{**entry, "tests": tuple(entry["tests"])}) for number, entry in enumerate(entries, 1)
    ]


def run_tests(source: Path, tests: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """Run tests with the library in `source`. Return the exit status of pytest, None after a time-out, and its text."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-rf", "--no-header", *tests]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its session, with the ranks that the tests have started
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def try_mutant(mutant: Mutant) -> tuple[str, str]:
    """Return ("killed" or "survived" or "invalid", why)."""
    with tempfile.TemporaryDirectory(prefix="thinwire-mutant-") as folder:
        # With the compiled kernels beside the sources, which stay valid as long as no kernel changes.
        copied = Path(folder) / "src"
        shutil.copytree(LIBRARY, copied / "thinwire")
        (copied / "thinwire" / mutant.file).write_text(mutant.mutated())
        status, output = run_tests(copied, mutant.tests, TIMEOUT_SECONDS)
    if status is None:
        return "killed", f"after {TIMEOUT_SECONDS:g} s the tests had not ended"
    if status == TESTS_FAILED:
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return "killed", failed[1] if failed else output[-300:]
    return ("survived", "") if status == ALL_PASSED else ("invalid", output[-2000:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="N", help="numbers, or parts of a file's name")
    only, mutants = parser.parse_args().only, read_mutants()
    if only:
        mutants = [m for m in mutants if any(o == str(m.number) if o.isdigit() else o in m.file for o in only)]
    else:
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        status, output = run_tests(LIBRARY.parent, tests, 20 * TIMEOUT_SECONDS)
        if status != ALL_PASSED:
            print(f"without a mistake the tests do not pass:\n{output[-3000:]}")
            return 1
    killed = 0
    for mutant in mutants:
        started = time.monotonic()
        result, why = try_mutant(mutant)
        killed += result == "killed"
        seconds = f"{time.monotonic() - started:.0f} s"
        print(f"{mutant.number:3} {result:8} {seconds:>5}  {mutant.file}: {mutant.mistake}  {why}", flush=True)
    print(f"{killed} of {len(mutants)} killed")
    return 0 if killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
