"""Builds the command line for given options, to record it with the results."""

import re
import shlex
from dataclasses import fields

from .options import Options


def command(options: Options) -> str:
    """Return the command line with all options that differ from the defaults.

    >>> command(Options(worlds=(2, 4), ways=("dense", "fp16 hook"), relay=True))
    "thinwire bench link --rates 100mbit 1gbit 10gbit --worlds 2 4 --ways dense 'fp16 hook' --relay"
    """
    words = ["thinwire", "bench", "link"]
    defaults = Options.defaults(["--relay"] if options.relay else [])
    for field in fields(options):
        value = getattr(options, field.name)
        if value != getattr(defaults, field.name):
            listed = value if isinstance(value, tuple) else [] if value is True else [value]
            words += [f"--{field.name}", *map(_word, listed)]
    return shlex.join(words)


def _word(value: object) -> str:
    """Return a value as an argument of the command line.

    >>> _word(7.35e6), _word(2)
    ('7.35e6', '2')
    """
    return re.sub(r"e\+0*", "e", f"{value:g}") if isinstance(value, float) else str(value)
