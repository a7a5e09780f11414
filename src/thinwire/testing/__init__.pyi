"""The public names, once: for type checkers, and for `__init__.py`, which loads each on first use."""

from .faults import Fault as Fault
from .faults import InjectedError as InjectedError
from .faults import Kill as Kill
from .faults import NotFinite as NotFinite
from .faults import RaiseError as RaiseError
from .faults import Stop as Stop
from .faults import inject as inject
from .pool import LOST as LOST
from .pool import Lost as Lost
from .pool import RankError as RankError
from .pool import RankPool as RankPool
from .pool import store_barrier as store_barrier
from .threads import run_threads as run_threads
