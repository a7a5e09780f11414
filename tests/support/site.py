"""The site of the docs, for tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.frameworks.runs import require

ROOT = Path(__file__).parents[2]


def build_site(folder: Path) -> Path:
    """Build the site into a folder, as `make docs` does, and return the folder. There may be no warning."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        require(package, extra="docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert not re.search("warning|error", done.stdout + done.stderr, re.IGNORECASE), done.stderr
    return folder
