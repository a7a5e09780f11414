"""Cutting of a bucket, the flat gradient of some parameters, into slices and packed parameters.

Neighbouring parameters with the same compressor form a slice, which is compressed as one tensor. Small and dense ones
(biases, norms) in the middle of a slice do not interrupt it: zeros take their place. They are packed: those of several
buckets are copied into one tensor and exchanged together.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compressors import Compressor, NoCompression
from ..kernels.joined import Flat, tensors_of

_TAKEN_OUT = 1 << 16
"""A larger packed parameter interrupts a slice: zeros in its place would cost more than a second slice."""


class Bucket(NamedTuple):
    """A flat gradient of several parameters: a bucket of DDP, or one made by `flatten`."""

    tensor: Tensor
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def parts(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.tensor.split(list(self.sizes)), strict=True))


@dataclass(frozen=True)
class Slice:
    """A slice of a bucket: consecutive parameters that are compressed as one tensor."""

    start: int
    stop: int
    compressor: Compressor
    family: Hashable
    names: tuple[str | None, ...]  # names of the parameters; None for a packed parameter in the middle
    sizes: tuple[int, ...]

    @cached_property
    def key(self) -> tuple[tuple[str | None, int], ...]:
        return tuple(zip(self.names, self.sizes, strict=True))

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Return the (start, stop) of packed parameters in the middle, counted from the start of the slice."""
        ends = list(accumulate(self.sizes))
        return [(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True) if name is None]

    @cached_property
    def seed(self) -> int:
        """Return the seed of this slice's random draws, which is combined with the step number."""
        return zlib.crc32(str(self.names[0]).encode())

    def parts(self, flat: Flat) -> list[tuple[str, Any]]:
        parts = zip(self.names, flat.split(list(self.sizes)), strict=True)
        return [(name, part) for name, part in parts if name is not None]


class Packed(NamedTuple):
    """A parameter that is packed with others and sent in one operation."""

    name: str
    start: int
    stop: int


class PackedGradients(NamedTuple):
    """Packed parameters of one bucket that wait to be sent together with those of other buckets."""

    flat: Flat  # the gradient of the bucket
    parts: Sequence[Packed]
    compressor: Compressor
    copied: Tensor | None  # the gradients, one after the other; None if the bucket still holds them when they are sent

    @property
    def nbytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts) * self.flat.dtype.itemsize

    def pieces(self) -> list[Tensor]:
        return [piece for part in self.parts for piece in tensors_of(self.flat[part.start : part.stop])]


class BucketPlan(NamedTuple):
    """The slices of a bucket, and its packed parameters by their compressor."""

    slices: list[Slice]
    packed: dict[Compressor, list[Packed]]


def plan_bucket(
    names: Sequence[str],
    sizes: Sequence[int],
    compressors: Sequence[Compressor],
    families: Sequence[Hashable],
    small: Collection[str] = (),
) -> BucketPlan:
    """Cut a bucket into slices of one family each, and packed parameters: small and uncompressed ones.

    >>> from thinwire import NoCompression, TopK
    >>> dense, topk = NoCompression(), TopK(ratio="1/64")
    >>> plan = plan_bucket(["w", "b", "v"], [8000, 10, 9000], [topk, dense, topk], [0, 0, 0])
    >>> plan.packed[dense], [(one.start, one.stop, one.gaps) for one in plan.slices]
    ([Packed(name='b', start=8000, stop=8010)], [(0, 17010, [(8000, 8010)])])
    """
    slices: list[Slice] = []
    packed: dict[Compressor, list[Packed]] = {}
    waiting: list[int] = []  # sizes of packed parameters that become gaps if the slice continues after them
    start = 0
    for name, size, compressor, family in zip(names, sizes, compressors, families, strict=True):
        stop = start + size
        last = slices[-1] if slices else None
        if isinstance(compressor, NoCompression) or name in small:
            packed.setdefault(compressor, []).append(Packed(name, start, stop))
            waiting.append(size)
        elif (
            last is not None
            and (last.compressor, last.family) == (compressor, family)
            and all(taken_out <= _TAKEN_OUT for taken_out in waiting)
        ):
            kept = last.names + (None,) * len(waiting) + (name,)
            slices[-1] = replace(last, stop=stop, names=kept, sizes=(*last.sizes, *waiting, size))
            waiting = []
        else:
            slices.append(Slice(start, stop, compressor, family, names=(name,), sizes=(size,)))
            waiting = []
        start = stop
    return BucketPlan(slices, packed)


BUCKET_BYTES = 25 << 20  # without DDP


def group_parameters(
    named: Sequence[tuple[str, Tensor]], nbytes: Mapping[str, int] | None = None
) -> list[list[tuple[str, Tensor]]]:
    """Group parameters by dtype and device, with up to `BUCKET_BYTES` in each group, in reverse order as in DDP.

    They count by `nbytes`, if given. Raises ValueError for two of one name, or a sparse gradient.
    """
    for name, count in Counter(name for name, _ in named).most_common(1):
        if count > 1:
            raise ValueError(f"two parameters are called {name!r}")
    groups: list[list[tuple[str, Tensor]]] = []
    unfinished: dict[tuple[torch.dtype, torch.device], tuple[list[tuple[str, Tensor]], int]] = {}
    for name, parameter in reversed(named):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(f"the gradient of {name!r} is {parameter.grad.layout}, expected a dense one")
        kind, size = (parameter.dtype, parameter.device), parameter.nbytes if nbytes is None else nbytes[name]
        group, room = unfinished.get(kind, ([], -1))
        if size > room:
            group, room = [], BUCKET_BYTES
            groups.append(group)
        unfinished[kind] = group, room - size
        group.append((name, parameter))
    return groups


def flatten(group: Sequence[tuple[str, Tensor]]) -> Bucket:
    """Copy gradients into one flat tensor, and make them views of it, so that there is no second copy."""
    first, sizes = group[0][1], tuple(p.numel() for _, p in group)
    flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    bucket = Bucket(flat, tuple(name for name, _ in group), sizes)
    for (_, parameter), part in zip(group, bucket.parts().values(), strict=True):
        view = shaped(part, parameter)
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)
        parameter.grad = view
    return bucket


def plain_name(name: str) -> str:
    """Return a parameter's name without what torch.compile and activation checkpointing put in front of it.

    >>> plain_name("blocks.0._orig_mod.weight"), plain_name("blocks.0._checkpoint_wrapped_module.weight")
    ('blocks.0.weight', 'blocks.0.weight')
    """
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def shaped(elements: Tensor, parameter: Tensor) -> Tensor:
    """Return a part of a bucket as a view in the shape of its parameter, and its strides if they leave no gap.

    >>> shaped(torch.arange(6.0), torch.empty(3, 2).t())  # columns lie together in memory
    tensor([[0., 2., 4.],
            [1., 3., 5.]])
    """
    if not _is_dense(parameter.stride(), parameter.shape):
        return elements.view(parameter.shape)
    return elements.as_strided(parameter.shape, parameter.stride(), elements.storage_offset())


def flat(parameter: Tensor) -> Tensor:
    """Return the elements of a parameter in the order of `shaped`; they are copied only if its memory has gaps."""
    if not _is_dense(parameter.stride(), parameter.shape):
        return parameter.reshape(-1)
    return parameter.as_strided((parameter.numel(),), (1,), parameter.storage_offset())


@lru_cache(maxsize=4096)
def _is_dense(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
