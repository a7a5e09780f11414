"""The examples and the README's code run as they stand."""

import os
import re
import sys
from pathlib import Path

import pytest

from support.frameworks.runs import require
from support.loaded import run_script
from support.processes import finish
from support.slow import slow

ROOT = Path(__file__).parents[2]


@pytest.mark.alone
def test_all_reduce_example_counts_the_bytes() -> None:
    """The kernel's own counter of the loopback interface must show a reduction of 190x against a dense all-reduce.

    What other programs send meanwhile is counted too, so that one of three runs must be free of it.
    """
    for _ in range(3):
        output = run_script(ROOT / "examples" / "all_reduce.py")
        assert re.search(r"replicas identical +True", output), output
        if not Path("/proc/net/dev").exists():
            return
        times_less = re.search(r"(\d+) times less", output)
        assert times_less, output
        assert int(times_less[1]) <= 196, output
        if int(times_less[1]) >= 190:
            return
    pytest.fail(output)


def torchrun(example: str, ranks: int, *args: str) -> str:
    """What it prints under torchrun itself; the ranks share what cores there are."""
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return finish(*start, ROOT / "examples" / example, *args, OMP_NUM_THREADS="1")


@pytest.mark.parametrize(
    ("example", "ranks", "least", "most"),
    [
        ("ddp.py", 2, 20, None), slow("plain_loop.py", 2, 20, None), ("fsdp.py", 4, None, 10),
        ("local_steps.py", 2, 1000, 100),
    ],
)  # fmt: skip
def test_training_examples_learn_with_few_bytes(
    example: str, ranks: int, least: float | None, most: float | None
) -> None:
    """A reduction of so much at least, and so many kB at most; half of the gradients under FSDP are 541 kB."""
    output = torchrun(example, ranks) if most is None else run_script(ROOT / "examples" / example, ranks=ranks)
    lines = re.findall(r"step (\d+): loss ([\d.]+), (?:([\d.]+) kB)?", output)
    steps = [int(step) for step, _, _ in lines]
    assert steps in ([50, 100], [50, 100, 150, 200], [80, 160, 240, 320]), output
    assert float(lines[-1][1]) < 0.6 * float(lines[0][1]), output
    assert most is None or float(lines[-1][2]) < most, output
    assert least is None or int(re.findall(r"reduction (\d+)x", output)[-1]) >= least, output


def test_a_newcomer_joins_while_others_train() -> None:
    output = finish(sys.executable, ROOT / "examples" / "elastic.py", OMP_NUM_THREADS="1")
    begun = dict(re.findall(r"rank (\d) begins at step (\d+)", output))
    assert (begun["0"], begun["1"]) == ("0", "0"), output
    assert int(begun["2"]) > 0, output
    ended = re.findall(r"rank (\d) ends with (\d) ranks, loss ([\d.]+)", output)
    assert sorted((rank, size) for rank, size, _ in ended) == [("0", "3"), ("1", "3"), ("2", "3")]
    assert all(float(loss) < 0.1 for _, _, loss in ended), output  # it begins with 0.4


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning", "accelerate", "transformers"])
def test_examples_of_frameworks_learn_and_go_on(package: str, tmp_path: Path) -> None:
    require(package)
    example, folder = f"with_{package}.py", str(tmp_path / "run")
    losses = []
    for first in (0, 200):
        if package == "lightning":  # which starts the other rank itself
            output = finish(sys.executable, ROOT / "examples" / example, folder, OMP_NUM_THREADS="1")
        else:
            output = torchrun(example, 2, folder)
        lines = re.findall(r"^step (\d+): loss ([\d.]+), reduction (\d+)x", output, re.MULTILINE)
        assert [int(step) for step, _, _ in lines] == [first + step for step in (50, 100, 150, 200)], output
        assert all(int(reduction) >= 20 for _, _, reduction in lines), output
        losses += [float(loss) for _, loss, _ in lines]
    assert losses[3] < 0.6 * losses[0], losses
    assert losses[-1] < losses[3], "it goes on from where it was"


@pytest.mark.slow
def test_the_resume_example_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    printed = "".join(torchrun("resume.py", ranks, str(tmp_path)) for ranks in (2, 3))
    assert re.search(r"steps 1 to 100\b.*steps 101 to 200\b", printed, re.DOTALL), printed
    first, again = re.findall(r"loss ([\d.]+)", printed)
    assert float(first) > float(again), printed


def test_examples_are_short_that_of_tests_passes_and_the_code_of_the_readme_runs(tmp_path: Path) -> None:
    printed = run_script(ROOT / "examples" / "testing.py")
    assert len(re.findall(r" passed$", printed, re.MULTILINE)) == 3, printed
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, f"{path.name} is too long for an example"
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks, "README.md has no Python code"
    for block in blocks:
        (tmp_path / "readme.py").write_text(block)
        assert "bytes instead of 4000000" in run_script(tmp_path / "readme.py")


def test_commands_in_the_readme_run(tmp_path: Path) -> None:
    """In an empty folder, one after the other; the first is what `make demo` runs, and must learn and save bytes.

    Its links are ten times as fast here, since the dense training does little else than wait for them. With namespaces
    no other test sends on the interfaces that are counted.
    """
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    demo = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n")[1].strip()
    assert demo == f"$(BIN)/{commands[0]}"
    assert "--link 100mbit " in commands[0]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed, *_ = [
        finish(*command.replace(" 100mbit ", " 1gbit ").split(), cwd=tmp_path, PATH=path) for command in commands
    ]
    lines = re.findall(r"^\w+: 200 steps .* accuracy ([\d.]+)%, ([\d,.]+) MB sent", printed, re.MULTILINE)
    assert len(lines) == 2, printed
    assert all(float(accuracy) >= 97 for accuracy, _ in lines), printed
    ours, dense = (float(text.replace(",", "")) for _, text in lines)
    assert dense > 50 * ours, printed
    assert re.search(r"^Compared with dense training: [\d.]+x as fast, [\d.]+ % of the bytes", printed, re.MULTILINE)
    assert (tmp_path / "report.html").stat().st_size > 10_000
