"""A real Chromium without a network. Where there is none, these tests are skipped; in CI they fail."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")  # while it is open, no other test can run an event loop
def browser() -> Iterator[Browser]:
    if PROGRAM is None:
        reason = "no chromium on this machine: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"], timeout=60_000)
        yield browser
        browser.close()
