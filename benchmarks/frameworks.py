"""The same training by each framework and by a plain DDP loop: weights, bytes and a resume, as a table for the docs.

    unshare --net sh -c 'ip link set lo up && python benchmarks/frameworks.py --steps 300'

In a network namespace of its own, as here, the loopback interface carries nothing else. Needs thinwire[lightning],
[accelerate] and [transformers]; the programs are in tests/support/frameworks.
"""

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

from support.frameworks.runs import PROGRAMS, Trained, trained_by


def differ(trained: Trained, name: str, plain: Trained) -> str:
    try:
        trained.assert_same(name, plain, as_name="whole")
    except AssertionError as error:
        return f"no: {error}"
    return "same bits"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        trained = {name: trained_by(name, Path(folder) / name, steps) for name in PROGRAMS}
        plain = trained["plain"]
        print("| | weights | after a resume | bytes by the optimizer | bytes on the interface | against plain |")
        print("|---|---|---|---|---|---|")
        for name, one in trained.items():
            called = "plain DDP loop" if name == "plain" else f"{name} {version(name)}"
            sent, carried = one.result["bytes"], one.result["interface_bytes"]
            ratio = carried / plain.result["interface_bytes"] - 1
            same = [differ(one, which, plain) for which in ("whole", "whole-resumed")]
            print(f"| {called} | {same[0]} | {same[1]} | {sent:,} | {carried:,} | {ratio:+.1%} |")
    print(f"\n2 processes, CPU, {steps} steps, torch {torch.__version__}")


if __name__ == "__main__":
    main()
