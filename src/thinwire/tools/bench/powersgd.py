"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727) on any mean over ranks, because torch's hook needs processes and DDP.

Each gradient of two or more dimensions is a matrix of n rows (its first dimension) and m columns. In each step:

    M = gradient + error                     on this rank
    P = orthogonalize(mean of M Q)           n x rank; Q, m x rank, is that of the last step, orthogonalized
    Q = mean of M^T P
    gradient, error = P Q^T, M - P Q^T

The rules are those of torch's `powerSGD_hook` with its defaults: error feedback; Q drawn once, the same on all ranks;
the first steps dense; and matrices dense if (n + m) rank is at least half of n m. Matrices are processed in the order
of DDP's buckets, from the last parameter to the first, and Q is drawn as torch draws it.

There are two differences. Columns are orthogonalized by QR, and for rank 1 divided by their norm, where torch uses
Gram-Schmidt for ranks 1 and 2: signs differ, which cancel in P Q^T, and a column of zeros becomes a unit vector, not
NaN. Dense tensors have no error here. That of torch cancels in the next mean.

All P of a step are one tensor, as are all Q and all dense tensors, so a step has three all-reduces. Matrices of the
same shape are one batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

MIN_COMPRESSION_RATE = 2
"""Same as torch's default."""


class _Batch(NamedTuple):
    """All matrices of one shape."""

    parameters: list[nn.Parameter]
    p: Tensor
    """batch x n x rank, a view into all P."""
    q: Tensor
    """batch x m x rank, a view into all Q."""
    m: Tensor
    """batch x n x m: the error between steps, and error + gradient within a step."""


class PowerSGD:
    """Replaces gradients by their mean over ranks, with matrices approximated by matrices of low rank.

    parameters    parameters of the model, in its order. All must have gradients when `all_reduce_gradients` is called.
    mean          replaces a tensor by its mean over ranks.
    rank          rank of the approximation.
    dense_steps   number of dense steps before the first compressed one.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], mean: Callable[[Tensor], object], *, rank: int, dense_steps: int
    ) -> None:
        self._parameters = list(parameters)[::-1]
        self._mean, self._dense_steps, self._step = mean, dense_steps, 0
        self.numel_sent = 0
        """Number of elements that were all-reduced so far."""
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for one in self._parameters:
            if _pays(one, rank):
                by_shape.setdefault(_shape(one), []).append(one)
        compressed = {id(one) for group in by_shape.values() for one in group}
        self._dense = [one for one in self._parameters if id(one) not in compressed]
        like = self._parameters[0]
        shapes = [(len(group), n, m) for (n, m), group in by_shape.items()]
        self._p, self._q = (like.new_zeros(rank * sum(count * rows[i] for count, *rows in shapes)) for i in (0, 1))
        ps = self._p.split([rank * count * n for count, n, _ in shapes])
        qs = self._q.split([rank * count * m for count, _, m in shapes])
        generator = torch.Generator().manual_seed(int(np.random.RandomState(0).randint(1_000_000_000)))
        self._batches = []
        for group, (count, n, m), p, q in zip(by_shape.values(), shapes, ps, qs, strict=True):
            batch = _Batch(group, p.view(count, n, rank), q.view(count, m, rank), like.new_zeros(count, n, m))
            self._batches.append(batch)
            for matrix in batch.q:  # as torch's hook draws them, by its default seed
                matrix.copy_(torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype))

    @torch.no_grad()
    def all_reduce_gradients(self) -> None:
        """Replace the gradients of all parameters by their mean. Call it once in each step, on all ranks."""
        compresses = self._step >= self._dense_steps
        self._step += 1
        if whole := self._dense if compresses else self._parameters:
            flat = torch.cat([gradient_of(one).flatten() for one in whole])
            self._all_reduce(flat)
            write_gradients(whole, flat.split([one.numel() for one in whole]))
        if not compresses or not self._batches:
            return
        for batch in self._batches:
            orthogonalize(batch.q)
            batch.m.add_(torch.stack([gradient_of(one).flatten(1) for one in batch.parameters]))
            torch.bmm(batch.m, batch.q, out=batch.p)
        self._all_reduce(self._p)
        for batch in self._batches:
            orthogonalize(batch.p)
            torch.bmm(batch.m.mT, batch.p, out=batch.q)
        self._all_reduce(self._q)
        for batch in self._batches:
            approximation = torch.bmm(batch.p, batch.q.mT)
            batch.m.sub_(approximation)
            write_gradients(batch.parameters, approximation)

    def _all_reduce(self, flat: Tensor) -> None:
        self.numel_sent += flat.numel()
        self._mean(flat)


def orthogonalize(matrices: Tensor) -> None:
    """Give a batch of tall matrices orthonormal columns that span the same space.

    >>> matrices = torch.tensor([[[3.0], [4.0]], [[0.0], [0.0]]])
    >>> orthogonalize(matrices)
    >>> matrices.squeeze(-1)
    tensor([[0.6000, 0.8000],
            [1.0000, 0.0000]])
    """
    if matrices.shape[2] > 1:
        matrices.copy_(torch.linalg.qr(matrices)[0])
        return
    norms = matrices.norm(dim=1, keepdim=True)
    matrices /= torch.where(norms > 0, norms, 1)
    matrices[:, :1] += norms == 0


def _shape(parameter: Tensor) -> tuple[int, int]:
    rows = parameter.shape[0]
    return rows, parameter.numel() // rows


def _pays(parameter: Tensor, rank: int) -> bool:
    """Return whether P and Q are smaller than half of the matrix. If so, rank is also less than n and m."""
    if parameter.dim() < 2 or not parameter.numel():
        return False
    n, m = _shape(parameter)
    return (n + m) * min(n, m, rank) * MIN_COMPRESSION_RATE < n * m


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, which must have one."""
    assert parameter.grad is not None, f"a parameter of shape {tuple(parameter.shape)} has no gradient"
    return parameter.grad


def write_gradients(parameters: Sequence[nn.Parameter], values: Iterable[Tensor]) -> None:
    """Copy values into the gradients of parameters. Shapes may differ."""
    gradients = [gradient_of(one) for one in parameters]
    torch._foreach_copy_(gradients, [value.view_as(to) for value, to in zip(values, gradients, strict=True)])
