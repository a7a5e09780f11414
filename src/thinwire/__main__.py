"""Runs the command `thinwire` for `python -m thinwire`."""

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
