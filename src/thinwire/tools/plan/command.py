"""Select the mode of `thinwire plan` (numbers, measurement or check) and print its result."""

import os

from .options import Options
from .settings import check_plot, numbers, refuse_others


def command(options: Options) -> int:
    """Run the mode that the options select, and return 0.

    Raise ValueError for invalid options, before torch is loaded where possible.
    """
    if options.check is not None:
        return _check(options)
    check_plot(options.plot)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        from thinwire.tools.train.place import Place

        from .cluster_run import measured

        place = Place.of_torchrun()
        assert place is not None
        return measured(options, place)
    if options.model is not None:
        raise ValueError(
            f"--model {options.model} is measured by the ranks of a cluster: torchrun --nproc-per-node 2 -m thinwire "
            "plan --model ...; without one give --params and --step-compute"
        )
    given = numbers(options)
    from .scenario import case_of
    from .show import show

    show(case_of(given, options), options, given.host)
    return 0


def _check(options: Options) -> int:
    refuse_others(options, {"check"}, "with --check everything comes from the rows")
    assert options.check is not None
    if not options.check.is_file():
        raise ValueError(f"--check {options.check}: there is no such file, expected one of `thinwire bench link --out`")
    from .check import check, print_check

    print_check(check(options.check), options.check)
    return 0
