"""No read beyond the end either: buffers stand against pages that must not be touched, where one byte more is a crash.

In a process of its own, since that is how it fails.
"""

import os

import pytest

from support.processes import run_module


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
def test_cpu_kernels_touch_nothing_beyond_their_buffers() -> None:
    assert run_module("guard_pages") == "survived"
