"""Run many `python -m benchmarks recipe` commands on one GPU, several at a time, and join their rows in one file.

    PYTHONPATH=src python3 -m benchmarks.recipe_gpu JOBS OUT.jsonl [--at-once 12] [--seconds 500]

A line of JOBS has the options of one command. A line that begins with "all:" has those that all commands after it
share. The first jobs start first, so the longest belong there. CUDA's multi-process service, where it can be started,
lets the kernels of several processes run at the same time. What is not done after --seconds is stopped; its rows so far
count.

It needs the packages of the command, tyro and rich. For a machine where nothing can be installed, `pip install --target
FOLDER tyro rich` elsewhere, and add the folder to PYTHONPATH.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Run many commands of the recipe benchmark on one GPU.")
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=500.0)
    given = parser.parse_args()
    shared: list[str] = []
    waiting: list[list[str]] = []
    for line in given.jobs.read_text().splitlines():
        if line.startswith("all:"):
            shared = shlex.split(line.removeprefix("all:"))
        elif line.strip() and not line.startswith("#"):
            waiting.append([*shared, *shlex.split(line)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **multi_process_service()}
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        running: dict[subprocess.Popen[bytes], tuple[int, float]] = {}
        number = 0
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < given.at_once:
                command = [sys.executable, "-m", "benchmarks", "recipe", "--device", "cuda", *waiting.pop(0)]
                command += ["--out", f"{folder}/{number}.jsonl"]
                log = open(f"{folder}/{number}.log", "wb")  # noqa: SIM115
                running[subprocess.Popen(command, stdout=log, stderr=log, env=environment)] = number, time.monotonic()
                number += 1
            for process in [process for process in running if process.poll() is not None]:
                index, started = running.pop(process)
                print(f"job {index}: exit {process.returncode} after {time.monotonic() - started:.0f} s", flush=True)
                if process.returncode:
                    print(Path(folder, f"{index}.log").read_text()[-2000:], flush=True)
            time.sleep(0.2)
        for process, (index, _) in running.items():
            process.kill()
            process.wait()  # before its folder is removed
            print(f"job {index}: stopped after\n{Path(folder, f'{index}.log').read_text()[-2000:]}", flush=True)
        print(f"{len(waiting)} jobs were not started", flush=True)
        rows = [Path(folder, f"{index}.jsonl") for index in range(number)]
        given.out.write_text("".join(path.read_text() for path in rows if path.exists()))


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
