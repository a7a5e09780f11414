"""Every element as it is. torch's copy runs at memory bandwidth, so everything but the check is the reference."""

from torch import Tensor

from ..layout import DenseLayout
from ..reference.dense import commit as commit
from ..reference.dense import decode as decode
from ..reference.dense import encode as encode


def check(payload: Tensor, layout: DenseLayout) -> None:
    """Raise ValueError for bytes that no compressor can have written."""
    from .checks import check_values  # loads Numba, which nothing else here needs

    check_values(payload, layout)
