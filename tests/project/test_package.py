"""The wheel and the sdist have what they need and nothing else, and `thinwire train` runs from an installed wheel."""

import json
import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import thinwire
from support.frameworks.runs import require
from support.processes import finish

ROOT = Path(__file__).parents[2]
DATA = [
    "py.typed", "__init__.pyi", "tools/train/digits/digits.csv.gz", "tools/report/page.html",
    "tools/report/uplot/uPlot.iife.min.js",
]  # fmt: skip
LICENSES = ["LICENSE", "src/thinwire/tools/report/uplot/LICENSE", "src/thinwire/tools/train/digits/LICENSE"]


def build(source: Path, folder: Path, *targets: str) -> None:
    """Build a source tree with what is installed here: nothing is downloaded."""
    require("hatchling", extra="dev")
    finish(sys.executable, "-m", "hatchling", "build", "-d", folder, *targets, cwd=source)


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel; beside it lies the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_the_library_and_nothing_else_and_says_what_it_is(wheel: Path) -> None:
    sources, folder = ROOT / "src", f"thinwire-{thinwire.__version__}.dist-info"
    written = {
        path.relative_to(sources).as_posix()
        for path in (sources / "thinwire").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".nbi", ".nbc")
    }
    files = files_of(wheel)
    assert {name for name in files if ".dist-info/" not in name} == written
    assert files >= {f"thinwire/{name}" for name in DATA}
    assert files >= {f"{folder}/entry_points.txt", *(f"{folder}/licenses/{name}" for name in LICENSES)}
    with zipfile.ZipFile(wheel) as archive:
        about = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
    assert about["Version"] == thinwire.__version__
    assert about["License-Expression"] == "MIT AND BSD-3-Clause AND CC-BY-4.0"
    assert "Typing :: Typed" in (about.get_all("Classifier") or [])
    assert {"docs", "plot", "data"} <= set(about.get_all("Provides-Extra") or [])
    cited = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {re.escape(thinwire.__version__)}$", cited, re.MULTILINE)
    assert f"\n## {thinwire.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert {path.name for path in source.iterdir()} >= {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "docs"}
    assert not [path for path in source.rglob("*") if path.name.startswith("test_") or path.name == "conftest.py"]
    build(source, tmp_path, "-t", "wheel")
    (again,) = tmp_path.glob("*.whl")
    assert files_of(again) == files_of(wheel)


def last_step(folder: Path) -> int:
    """The last step of the only run in a folder."""
    (path,) = folder.glob("runs/*/metrics.jsonl")
    return max(line["step"] for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "step")


def test_it_trains_where_it_was_installed(wheel: Path, tmp_path: Path) -> None:
    """With the torch of this environment, in a folder of its own."""
    place = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    finish(*pip, "--target", place, wheel, cwd=tmp_path)
    here = {"PYTHONPATH": str(place), "THINWIRE_KERNELS": "reference"}  # the others would be compiled, for a minute
    where = finish(sys.executable, "-c", "import thinwire; print(thinwire.__file__)", cwd=tmp_path, **here)
    assert Path(where.strip()).is_relative_to(place)
    finish(place / "bin" / "thinwire", "train", "--steps", "2", cwd=tmp_path, **here)
    assert last_step(tmp_path) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_trains_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Packages come from where `make` gets them; torch is the one of constraints.txt."""
    finish(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    finish(*pip, "torch", cwd=tmp_path, limit=900)
    finish(*pip, wheel, cwd=tmp_path, limit=600)
    finish(python.with_name("thinwire"), "train", "--steps", "2", cwd=tmp_path, limit=600, PYTHONPATH="")
    assert last_step(tmp_path) == 2
