"""The place of a rank among the others. This module does not import torch."""

import os
from collections.abc import Mapping
from typing import NamedTuple, Self


class Place(NamedTuple):
    """A rank and the world size, in the whole run and on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def of_torchrun(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return the place that torchrun, or a launcher with the same variables, has set; None without such a launcher.

        Raises ValueError if a variable has no whole number.
        """
        if not {"RANK", "WORLD_SIZE"} <= environment.keys():
            return None
        defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        return cls(*(int(environment.get(name, default)) for name, default in defaults.items()))
