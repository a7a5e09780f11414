"""benchmarks/fsdp_bytes.py: bytes between replicas of a sharded model, from the counters of interfaces."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "fsdp_bytes.py"


@pytest.mark.slow
@pytest.mark.usefixtures("lab_can_be_built", "untouched")
def test_a_rank_sends_its_share_of_the_bytes_of_ddp_over_the_interface() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "2x2"], capture_output=True, text=True, timeout=300, check=False)
    found = re.search(r"x 2 / DDP = ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) == pytest.approx(1.0, abs=0.02)
