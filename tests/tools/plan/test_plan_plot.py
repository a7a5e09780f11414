"""The plot: a picture by matplotlib, which an optional extra installs."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.plan_cases import COSTLY, MADE, case
from thinwire.tools import cli
from thinwire.tools.plan.show import draw

GIVEN = ["plan", "--params", "25M", "--world", "4", "--bandwidth", "1gbit", "--step-compute", "100ms"]


def test_every_method_has_a_curve_in_both_panels(tmp_path: Path) -> None:
    out = tmp_path / "plan.svg"
    draw(case(speeds=COSTLY), MADE, out)
    root = ElementTree.parse(out).getroot()
    assert root.tag.endswith("svg")
    names = [element.attrib.get("id", "") for element in root.iter()]
    assert len([name for name in names if name.startswith("axes_")]) == 2
    text = out.read_text()
    for name in (
        "fp16 hook",
        *(f"{mode} {spec}" for mode, spec in zip(("attach", "thinwire.AdamW"), MADE, strict=True)),
    ):
        assert name in text


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.png"
    assert cli.main([*GIVEN, "--plot", str(out)]) == 0
    assert f"{out}: speed-up against bandwidth and world size" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_install_it(tmp_path: Path) -> None:
    script = (
        "import sys, importlib.abc\n"
        "class Hidden(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'matplotlib': raise ModuleNotFoundError(name)\n"
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'matplotlib' else real(name, *rest)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "from thinwire.tools.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for words, code in ((GIVEN, 0), ([*GIVEN, "--plot", str(tmp_path / "plan.svg")], 2)):
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, done.stderr
    assert "needs matplotlib, which is not installed: pip install 'thinwire[plot]'" in done.stderr
    assert done.stderr.count("\n") == 1
