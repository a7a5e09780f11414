"""Print a case with its predictions and advice, and write the plot."""

from .advice import advise
from .host import Host
from .model import Case
from .options import Options
from .scenario import compressors
from .simulate import simulate
from .table import print_case, print_predictions
from .ways import ways


def show(case: Case, options: Options, host: Host) -> None:
    """Print the case, the table of predictions and the advice, and write the plot if `--plot` is given."""
    made = compressors(options.specs)
    found = ways(made, case.cluster)
    predictions = [case.predict(way) for way in found]
    simulated = [simulate(case, way, host) for way in found] if host.simulated else []
    print_case(case, host)
    print_predictions(case, predictions, made, simulated)
    for line in advise(case, predictions, made):
        print(line)
    if options.plot is not None:
        from .plot import draw

        options.plot.write_text(draw(case, made), encoding="utf-8")
        print(f"{options.plot}: open it in a browser")
