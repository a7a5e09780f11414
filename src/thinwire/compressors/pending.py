"""A compression that may yet turn out not to count, as when another rank's gradient holds NaN."""

import torch
from torch import Tensor

from .. import kernels
from .compressed import CompressedTensor


class Pending:
    """A payload, and what becomes of the residual when it is known whether it counts.

    On the processor the residual changes in the end. On an accelerator `compress` has changed it in the pass that made
    the payload, which costs less memory traffic than two passes; there it is taken back if it has to be, to the
    rounding of an addition.
    """

    def __init__(
        self, ct: CompressedTensor, tensor: Tensor, residual: Tensor | None, kernel: kernels.Kernel, *, updated: bool
    ) -> None:
        self.ct = ct
        self._tensor, self._residual, self._kernel, self._updated = tensor, residual, kernel, updated
        self._settled = residual is None or ct.numel == 0

    @torch.no_grad()
    def settle(self, counts: bool) -> None:
        """Only the first call does anything. The tensor must be as it was, or as an update left it."""
        if self._settled:
            return
        self._settled = True
        residual, ct = self._residual, self.ct
        assert residual is not None
        if counts and not self._updated:
            self._kernel.commit(self._tensor, residual, ct.layout, ct.key, ct.payload)
        elif not counts and self._updated:
            kernel = kernels.on_device(self._kernel)
            assert kernel is not None
            kernel.undo(self._tensor, residual, ct.layout, ct.key, ct.payload)
