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
same shape are multiplied as one batch. All matrices are orthogonalized as one batch, padded with rows of zeros.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

MIN_COMPRESSION_RATE = 2
"""Same as torch's default."""


@dataclass
class _Batch:
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
        matrices = [one for one in self._parameters if _pays(one, rank)]
        compressed = {id(one) for one in matrices}
        self._dense = [one for one in self._parameters if id(one) not in compressed]
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for one in matrices:
            by_shape.setdefault(_shape(one), []).append(one)
        shapes = [(len(group), n, m) for (n, m), group in by_shape.items()]
        like = self._parameters[0]
        self._p = _LowRank([(count, n) for count, n, _ in shapes], rank, like)
        self._q = _LowRank([(count, m) for count, _, m in shapes], rank, like)
        self._q.draw()
        self._batches = [
            _Batch(parameters=group, p=p, q=q, m=like.new_zeros(len(group), n, m))
            for ((n, m), group), p, q in zip(by_shape.items(), self._p.batches, self._q.batches, strict=True)
        ]

    @torch.no_grad()
    def all_reduce_gradients(self) -> None:
        """Replace the gradients of all parameters by their mean. Call it once in each step, on all ranks."""
        compresses = self._step >= self._dense_steps
        self._step += 1
        self._all_reduce_dense(self._dense if compresses else self._parameters)
        if compresses and self._batches:
            self._all_reduce_matrices()

    def _all_reduce_dense(self, parameters: Sequence[nn.Parameter]) -> None:
        if parameters:
            flat = torch.cat([gradient_of(one).flatten() for one in parameters])
            self._all_reduce(flat)
            write_gradients(parameters, flat.split([one.numel() for one in parameters]))

    def _all_reduce_matrices(self) -> None:
        self._q.orthogonalize()
        for batch in self._batches:
            batch.m += torch.stack([gradient_of(one).flatten(1) for one in batch.parameters])
            torch.bmm(batch.m, batch.q, out=batch.p)
        self._all_reduce(self._p.flat)
        self._p.orthogonalize()
        for batch in self._batches:
            torch.bmm(batch.m.mT, batch.p, out=batch.q)
        self._all_reduce(self._q.flat)
        for batch in self._batches:
            approximation = torch.bmm(batch.p, batch.q.mT)
            batch.m -= approximation
            write_gradients(batch.parameters, approximation)

    def _all_reduce(self, flat: Tensor) -> None:
        self.numel_sent += flat.numel()
        self._mean(flat)


class _LowRank:
    """All P, or all Q: one tensor, and a view of it for each batch."""

    def __init__(self, shapes: Sequence[tuple[int, int]], rank: int, like: Tensor) -> None:
        """Allocate the tensor. `shapes` holds the number of matrices and the number of rows of each batch."""
        self.flat = like.new_zeros(sum(count * rows for count, rows in shapes) * rank)
        parts = self.flat.split([count * rows * rank for count, rows in shapes])
        self.batches = [part.view(count, rows, rank) for part, (count, rows) in zip(parts, shapes, strict=True)]
        height = max((rows for _, rows in shapes), default=0)
        heights = torch.tensor([rows for count, rows in shapes for _ in range(count)], dtype=torch.long)
        self._shape = len(heights), height, rank
        real = torch.arange(height).unsqueeze(0) < heights.unsqueeze(1)
        self._index = real.unsqueeze(-1).expand(self._shape).flatten().nonzero().flatten().to(like.device)
        """Positions of the elements if each matrix were padded to the rows of the tallest."""

    def draw(self) -> None:
        """Fill the matrices with the random numbers that torch's hook would draw, by its default seed."""
        generator = torch.Generator().manual_seed(int(np.random.RandomState(0).randint(1_000_000_000)))
        for batch in self.batches:
            for matrix in batch:
                matrix.copy_(torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype))

    def orthogonalize(self) -> None:
        padded = self.flat.new_zeros(self._shape).flatten()
        padded.index_copy_(0, self._index, self.flat)
        torch.index_select(orthogonalize(padded.view(self._shape)).flatten(), 0, self._index, out=self.flat)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return a batch of tall matrices with orthonormal columns that span those of `matrices`, which are overwritten.

    >>> orthogonalize(torch.tensor([[[3.0], [4.0]], [[0.0], [0.0]]])).squeeze(-1)
    tensor([[0.6000, 0.8000],
            [1.0000, 0.0000]])
    """
    if matrices.shape[2] > 1:
        q: Tensor = torch.linalg.qr(matrices)[0]
        return q
    norms = matrices.norm(dim=1, keepdim=True)
    matrices /= torch.where(norms > 0, norms, 1)
    matrices[:, :1] += norms == 0
    return matrices


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
