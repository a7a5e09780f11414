"""Importing this module loads Numba and all that it needs before it can run a kernel, which takes half a second.

It is for a process of which others are copies, as multiprocessing's fork server makes them: they start with it loaded.
Numba starts no thread until it runs a parallel kernel, and there is none here, so such a process can be copied.
"""

from numba.core.registry import cpu_target

from . import jit as jit

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
