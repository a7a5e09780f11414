"""Tests whose ranks are threads, all with the same body."""

from collections.abc import Callable
from typing import Any

from thinwire.collectives import LocalGroup
from thinwire.testing import run_threads


def by_threads(world_size: int, **options: Any) -> Callable[[Callable[[LocalGroup], object]], Callable[[], None]]:
    """Make a test of a function of one rank's group, which all ranks call.

    >>> @by_threads(2)
    ... def test_there_are_two(group):
    ...     assert group.size == 2
    >>> test_there_are_two()
    """

    def decorate(function: Callable[[LocalGroup], object]) -> Callable[[], None]:
        def test() -> None:
            run_threads(function, world_size, **options)

        test.__name__, test.__qualname__, test.__doc__ = function.__name__, function.__qualname__, function.__doc__
        test.__module__ = function.__module__
        return test

    return decorate
