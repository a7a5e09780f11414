"""Tests of code that uses thinwire: several ranks in one test, and faults at a rank and a step.

run_threads   ranks as threads of this process. Starts at once; for what ranks compute.
RankPool      ranks as processes with a gloo group. For DDP, for torch.distributed, and for ranks that die.
inject        lets faults happen: RaiseError, Kill, Stop, NotFinite, DamagedPayload.
guarded       a tensor for a kernel to write to, which fails if something beside it was written.

thinwire's own tests use this module. It does not need pytest. docs/collectives.md has examples.
"""

from .faults import DamagedPayload as DamagedPayload
from .faults import Fault as Fault
from .faults import InjectedError as InjectedError
from .faults import Kill as Kill
from .faults import NotFinite as NotFinite
from .faults import RaiseError as RaiseError
from .faults import Stop as Stop
from .faults import inject as inject
from .memory import guarded as guarded
from .processes import LOST as LOST
from .processes import Lost as Lost
from .processes import RankError as RankError
from .processes import RankPool as RankPool
from .processes import store_barrier as store_barrier
from .threads import run_threads as run_threads
