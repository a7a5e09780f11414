"""docs/two-machines.md: its commands as they stand there, in two network namespaces as two machines.

The namespaces have the addresses and the interface of the page. Nothing but their own network can be reached from them.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.namespaces import Lab
from support.training_runs import Done, Job, checkpoints

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "two-machines.md"
BLOCKS = re.findall(
    r"^```sh\n# (both machines|machine A|machine B)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
BOTH = [script for where, script in BLOCKS if where == "both machines"]
PAIRS = list(zip(*([script for where, script in BLOCKS if where == f"machine {name}"] for name in "AB"), strict=True))

pytestmark = pytest.mark.usefixtures("lab_can_be_built", "untouched")


class Machines(NamedTuple):
    lab: Lab
    folders: tuple[Path, Path]

    @contextmanager
    def start(self, *scripts: str) -> Iterator[list[Job]]:
        """Start a script on each at the same time, as a user's shell would."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        shells = [("ip", "netns", "exec", name, "bash", "-c") for name in self.lab.links.namespaces[1:]]
        with ExitStack() as stack:
            yield [
                stack.enter_context(Job(folder, script, program=shell, PATH=path))
                for shell, folder, script in zip(shells, self.folders, scripts, strict=True)
            ]

    def run(self, *scripts: str) -> tuple[Done, Done]:
        with self.start(*scripts) as jobs:
            first, second = (job.end() for job in jobs)
        return first, second


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Two machines without a common disk, on a link of 1 Gbit/s. The user is in a checkout on both."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    folders = tmp_path / "A", tmp_path / "B"
    for folder in folders:
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
    with Lab(2, 1e9) as lab:
        yield Machines(lab, folders)


def pair(text: str) -> tuple[str, str]:
    """The one pair of scripts that has a text, of both machines."""
    (found,) = [scripts for scripts in PAIRS if f"{text}\n" in scripts[0]]
    return found


def test_the_commands_differ_by_the_rank_of_the_node_alone() -> None:
    assert len(PAIRS) == 4
    for first, second in PAIRS:
        assert first.count("--node-rank 0") == 1
        assert first.replace("--node-rank 0", "--node-rank 1") == second


def test_training(machines: Machines) -> None:
    """As the page says, with what it says that there is to see; then they go on."""
    scripts = pair("-m thinwire train --steps 60 --out run")
    for done in machines.run(BOTH[1], BOTH[1]):
        assert re.search(r"^eth0\S* +UP +10\.83\.0\.[12]/24", done.out, re.MULTILINE), done
    before = machines.lab.sent_bytes()
    first, second = machines.run(*scripts)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "2 ranks on cpu, in run" in first.err
    assert first.out.endswith("run run, report run/report.html\n")
    assert second.out == ""
    assert "step" not in second.err
    here, there = (folder / "run" for folder in machines.folders)
    for name in ("metrics.jsonl", "report.html", "weights.pt"):
        assert (here / name).exists()
        assert not (there / name).exists()
    for rank, folder in enumerate((here, there)):
        assert checkpoints(folder) == [60]
        assert [path.name for path in folder.glob("checkpoints/*/rank*.pt")] == [f"rank{rank}.pt"]
    sent = [after - at for after, at in zip(machines.lab.sent_bytes(), before, strict=True)]
    rows = [json.loads(line) for line in (here / "metrics.jsonl").read_text().splitlines()]
    payload = next(row["bytes_sent"] for row in rows if row["kind"] == "end")
    assert all(each > payload for each in sent), "all of it over the link"
    assert sent == pytest.approx([5.5e6, 3e6], rel=0.2), "as the page says"


@pytest.mark.slow
def test_a_training_goes_on(machines: Machines) -> None:
    first, second = machines.run(*pair("-m thinwire train --steps 60 --out run"))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    first, second = machines.run(*pair("-m thinwire train --steps 80 --out run --resume auto"))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "resuming from step 60" in first.err
    assert checkpoints(machines.folders[1] / "run")[-1] == 80


@pytest.mark.slow
def test_the_link_is_measured(machines: Machines) -> None:
    first, second = machines.run(*pair("-m thinwire plan --params 635k --step-compute 50ms"))
    assert (first.code, second.code, second.out) == (0, 0, ""), first.err + second.err
    assert re.match(r"635 k parameters in \d bucket\(s\) of float32; 2 ranks, each with a link of ", first.out), (
        first.out
    )
    assert re.search(r"^(Use|Do not compress)", first.out, re.MULTILINE)


@pytest.mark.slow
def test_a_script_of_ones_own(machines: Machines) -> None:
    versions = machines.run(BOTH[0], BOTH[0])
    assert versions[0].out == versions[1].out != ""
    first, second = machines.run(*pair("--master-port 29500 examples/ddp.py"))
    assert (first.code, second.code, second.out) == (0, 0, ""), first.err + second.err
    assert "step 200: loss " in first.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interfaces", "message"),
    [
        (("lo", "lo"), "the store is there, but no rank answers at 127.0.0.1. On every node set GLOO_SOCKET_IFNAME, "),
        (("enp1s0", "eth0"), "GLOO_SOCKET_IFNAME=enp1s0 is no interface with an address here"),
    ],
)
def test_a_wrong_interface_is_one_line_that_says_what_to_do(
    interfaces: tuple[str, str], message: str, machines: Machines
) -> None:
    """The one that fails first says so; the other one waits for it, and is ended."""
    scripts = [
        script.replace("GLOO_SOCKET_IFNAME=eth0", f"GLOO_SOCKET_IFNAME={name}")
        for script, name in zip(pair("-m thinwire train --steps 60 --out run"), interfaces, strict=True)
    ]
    with machines.start(*scripts) as jobs:
        jobs[0].until(lambda: any(message in job.err for job in jobs))
        shown = [line for job in jobs for line in job.err.splitlines() if line.startswith("thinwire train: error: ")]
    assert any(message in line for line in shown), shown
