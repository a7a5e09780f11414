"""Predict whether compression makes a training step faster: the command `thinwire plan`.

options                 what the user gives, checked before torch is loaded
cluster                 ranks and their links
costs, methods          buckets of a model; speed of codec and wire; what each method computes and sends for a bucket
model                   time, bytes and memory of a step
local                   local steps: one exchange for many steps, another algorithm
measure                 measurements of one rank: codec, wire, steps
measured                a case with a model that is measured, by all ranks of torchrun or by this process
show                    the table, the recommendation and the plot
shared                  what measures steps: methods as `python -m benchmarks` names them, and their training loop
"""

import os

from .options import Options, check_plot, parse_numbers


def run(options: Options) -> int:
    """Run `thinwire plan` and return 0; raise ValueError for invalid options, before torch is loaded if possible."""
    check_plot(options.plot)
    if options.model is not None or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        from .measured import plan_measured

        return plan_measured(options)
    cluster, numel, seconds, origin = parse_numbers(options)
    import torch

    from .costs import Work, of_count, parse_specs
    from .measure import speeds_of
    from .model import Case
    from .show import show

    made = parse_specs(options.specs)
    dtype = getattr(torch, options.gradients)
    work = Work.of_step(of_count(numel, dtype), seconds, dtype=dtype)
    show(Case(work, cluster, speeds_of(options.codec, made, options.cores), options.shard, origin), made, options.plot)
    return 0
