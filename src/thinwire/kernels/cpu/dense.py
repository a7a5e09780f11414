"""Every entry as it is. Torch's own copy runs at the speed of the memory, so all but the check is the reference."""

from torch import Tensor

from ..layout import DenseLayout
from ..reference import dense as reference
from ..reference.dense import commit as commit
from ..reference.dense import decode as decode
from ..reference.dense import encode as encode


def check(payload: Tensor, layout: DenseLayout) -> None:
    """Raise ValueError for bytes that no compressor can have written: what `reference.dense.check` says, quickly."""
    from . import checks  # loads Numba, which nothing else here needs

    if not checks.values_are_good(payload, layout):
        checks.refuse_all(reference.check, payload, layout)
