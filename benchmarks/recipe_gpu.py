"""Run many `python -m benchmarks recipe` commands on one GPU, several at a time, and join their rows in one file.

    PYTHONPATH=src python3 -m benchmarks.recipe_gpu JOBS OUT.jsonl [--at-once 12] [--seconds 500]

A line of JOBS has the options of one command. A line that begins with "all:" has those that all commands after it
share. The first jobs start first, so the longest belong there. CUDA's multi-process service, where it can be started,
lets the kernels of several processes run at the same time. What is not done after --seconds is stopped; its rows so far
count.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Run many commands of the recipe benchmark on one GPU.")
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=500.0)
    given = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **multi_process_service()}
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:

        def run(number: int, words: list[str]) -> str:
            """Run a job while there is time, and return its rows."""
            started, rows, log = time.monotonic(), Path(folder, f"{number}.jsonl"), Path(folder, f"{number}.log")
            command = [sys.executable, "-m", "benchmarks", "recipe", "--device", "cuda", *words, "--out", str(rows)]
            ended = "was not started"
            if started < end:
                with log.open("wb") as text:
                    process = subprocess.Popen(command, stdout=text, stderr=text, env=environment)
                    try:
                        ended = f"exit {process.wait(end - started)}"
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
                        ended = "stopped"
                ended += f" after {time.monotonic() - started:.0f} s"
                ended += "" if ended.startswith("exit 0") else f"\n{log.read_text()[-2000:]}"
            print(f"job {number}: {ended}", flush=True)
            return rows.read_text() if rows.exists() else ""

        given.out.write_text("".join(pool.map(run, *zip(*enumerate(read_jobs(given.jobs)), strict=True))))


def read_jobs(path: Path) -> Iterator[list[str]]:
    """Yield the options of each job, those that it shares with others included."""
    shared: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("all:"):
            shared = shlex.split(line.removeprefix("all:"))
        elif line.strip() and not line.startswith("#"):
            yield [*shared, *shlex.split(line)]


def multi_process_service() -> dict[str, str]:
    """Start CUDA's multi-process service, if this machine has it; return the environment of its clients."""
    folder = tempfile.mkdtemp()
    service = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **service}, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no multi-process service: {error}", flush=True)
        return {}
    return service


if __name__ == "__main__":
    main()
