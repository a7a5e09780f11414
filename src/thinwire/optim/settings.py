"""Checks of the optimizers' arguments."""

from dataclasses import replace

from torch import Tensor

from ..compressors import compressor as parsed
from ..sync.policy import Policy, Spec


def checked(name: str, given: float, low: float, below: float) -> None:
    """Raise ValueError unless low <= given < below."""
    if isinstance(given, bool) or not isinstance(given, (int, float, Tensor)) or not low <= float(given) < below:
        upper = "or more" if below == float("inf") else f"to below {below:g}"
        raise ValueError(f"{name} {given!r}, expected {low:g} {upper}")


def policy_of(compressor: Spec | Policy, warmup_steps: int, warmup: Spec) -> Policy:
    """Return a policy with the warm-up of the optimizer; a policy with its own warm-up stays as it is."""
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise ValueError(f"warmup_steps {warmup_steps!r}, expected a whole number, 0 or more")
    phases = ((warmup_steps, parsed(warmup)),) if warmup_steps else ()
    if not isinstance(compressor, Policy):
        return Policy(compressor, warmup=phases)
    if compressor.warmup:
        return compressor
    return replace(compressor, warmup=phases)
