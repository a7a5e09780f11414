"""Lightning: a callback that makes the Trainer's DDP model exchange compressed gradients, for any optimizer.

thinwire's optimizers need none: let `configure_optimizers` return `thinwire.AdamW(self.parameters())`. This
module needs the package `lightning`, which thinwire does not install.
"""

from typing import Any
from weakref import ReferenceType, ref

import lightning.pytorch as pl

from ..integrations import attach
from ..sync.policy import Policy, Spec
from ..sync.synchronizer import Synchronizer


class Attach(pl.Callback):
    """Calls `thinwire.attach` on the model of `Trainer(strategy="ddp")`, on every device, and saves the residuals.

    compressor   a spec such as "quantize:bits=8", a `Compressor` or a `Policy`.
    options      as for `thinwire.attach`.

    Lightning's own option, `DDPStrategy(ddp_comm_hook=...)`, does nothing off CUDA, and what a hook keeps is in no
    checkpoint.
    """

    def __init__(self, compressor: Spec | Policy, **options: Any) -> None:
        self._compressor, self._options = compressor, options
        self._loaded: dict[str, Any] | None = None
        self._stage = "fit"
        self._module: ReferenceType[Any] | None = None  # the module of the last fit()
        self.sync: Synchronizer | None = None  # what `thinwire.attach` has returned, once training has begun

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remember what the Trainer does: a checkpoint that is loaded for a test is not for training."""
        self._stage = stage

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model, which is DDP by now, with the residuals of a checkpoint, or of a fit() before."""
        if self._loaded is None and self.sync is not None and self._module is not None and self._module() is pl_module:
            self._loaded = self.sync.state_dict()
        self._module = ref(pl_module)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.sync = attach(trainer.strategy.model, self._compressor, **{"grad_scaler": scaler, **self._options})
        if self._loaded is not None:
            self.sync.load_state_dict(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, which Lightning saves. All ranks call this."""
        if self.sync is None:
            return {}
        self.sync.consolidate_state_dict()
        return self.sync.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the model is there to attach to."""
        if self._stage == "fit":
            self._loaded = state_dict
