"""The learning rate over a run, as a factor of its highest value."""

import math

_RAMP, _FLOOR = 0.05, 0.1


def schedule(step: int, steps: int) -> float:
    """Return the factor of a step: it rises in a twentieth of the steps, then falls along a cosine to a tenth.

    >>> [round(schedule(step, 100), 3) for step in (0, 4, 50, 99)]
    [0.2, 1.0, 0.587, 0.1]
    """
    ramp = max(1, round(_RAMP * steps))
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, steps - ramp)
    return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2
