"""An optimizer of thinwire, as its synchronizer sees it: what becomes of gradients before they are sent."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..buckets import Bucket, Run
from ..kernels.layout import residual_dtype
from ..kernels.updates import Update
from .second_moment import sample

if TYPE_CHECKING:
    from .base import CompressedOptimizer


class UpdateTransform:
    """The optimizer, as its synchronizer sees it."""

    def __init__(self, optimizer: "CompressedOptimizer", max_grad_norm: float | None) -> None:
        if max_grad_norm is not None and (not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0):
            raise ValueError(f"max_grad_norm {max_grad_norm!r}, expected a number above 0, or None")
        self.optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self.whole = max_grad_norm is not None
        self.as_gradients, self.number = True, 0
        self.samples: dict[str, Tensor] = {}
        """Of this rank's gradient, by parameter, if the optimizer wants them of this step."""
        self.scale = 1.0
        """What GradScaler multiplied the loss by."""
        self._sampled: frozenset[str] = frozenset()
        """Names of those whose samples are kept at this step."""
        self._clip: float | Tensor = 1.0
        """What gradients are multiplied by; on a GPU it stays there, so that nobody waits for it."""

    def begin(self) -> bool:
        optimizer = self.optimizer
        if getattr(getattr(optimizer.ddp, "_join_config", None), "enable", False):
            raise RuntimeError(
                f"ddp.join() with thinwire.{type(optimizer).__name__}: a rank that has no more data could not step "
                "with the others; give all ranks as many batches, or use thinwire.attach"
            )
        if optimizer._exchanges() != optimizer._exchanged:
            raise RuntimeError(
                "a second exchange before step(): .grad holds an update by now, to which gradients cannot be added; "
                "exchange once a step, with DDP by no_sync() for all but the last backward pass"
            )
        scaler = optimizer.sync.grad_scaler
        self.scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        self._clip = 1.0
        self.number = optimizer.sync.steps
        self.as_gradients = optimizer._warms_up(self.number)
        self.samples, self._sampled = {}, optimizer._sampled_names()
        return self.as_gradients

    def sample(self, run: Run, tensor: Tensor) -> None:
        """Keep samples of the gradients of a run, where the optimizer measures by them."""
        if self._sampled:
            factor = self._clip / self.scale
            for name, part in zip(run.names, tensor.split(list(run.sizes)), strict=True):
                if name in self._sampled and part.numel():
                    self.samples[str(name)] = sample(part, self.number, str(name), factor)

    def look(self, buckets: Sequence[Bucket]) -> None:
        """Clip this rank's gradient. Of P ranks' gradients with independent noise the average is sqrt(P) shorter."""
        if self.max_grad_norm is None:
            return
        parts = {name: part for bucket in buckets for name, part in bucket.parts().items()}
        # In float64, since the square of a large float32 overflows.
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for _, part in sorted(parts.items())]
        limit = self.max_grad_norm * self.optimizer.sync.world_size**0.5
        if {norm.device for norm in norms} == {norms[0].device} and norms[0].is_cuda:
            total = torch.linalg.vector_norm(torch.stack(norms)) / self.scale
            self._clip = torch.where(total.isfinite(), (limit / (total + 1e-6)).clamp(max=1.0), 1.0).float()
            return
        norm = float(torch.linalg.vector_norm(torch.stack([each.cpu() for each in norms]))) / self.scale
        self._clip = min(1.0, limit / (norm + 1e-6)) if norm < float("inf") else 1.0  # the same in whatever buckets

    def family(self, name: str) -> int:
        return self.optimizer._families[name]

    def gradient(self, tensor: Tensor) -> None:
        """Clip a gradient; if its square would overflow the second moment, make it NaN, so that the step is void."""
        if isinstance(self._clip, Tensor):
            self._clip_on_device(tensor, self._clip)
        elif self._clip != 1.0:
            tensor.mul_(self._clip)
        limit = self.scale * torch.finfo(residual_dtype(tensor.dtype)).max ** 0.5
        if tensor.numel() and limit < torch.finfo(tensor.dtype).max:
            tensor.masked_fill_(torch.linalg.vector_norm(tensor, float("inf")) > limit, torch.nan)

    def _clip_on_device(self, tensor: Tensor, clip: Tensor) -> None:
        if tensor.dtype.itemsize >= clip.dtype.itemsize:
            tensor.mul_(clip)
        else:  # which would round the factor to 16 bits
            tensor.copy_(tensor.to(clip.dtype).mul_(clip))

    def prepare(self, run: Run, tensor: Tensor) -> None:
        self.optimizer._moments_of(run, tensor)

    def before(self, run: Run, tensor: Tensor) -> Update:
        group = self.optimizer.param_groups[run.family]  # type: ignore[call-overload]
        clip = self._clip
        if isinstance(clip, Tensor):
            self._clip_on_device(tensor, clip)
            clip = 1.0
        return self.optimizer._send(run, tensor, group, clip / self.scale)
