"""The tests of this folder need a GPU."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
