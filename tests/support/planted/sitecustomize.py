"""Python runs this at its start if this folder is in PYTHONPATH: a process that is about to train gets its fault.

The fault is a pickled object of `support.training_faults`, as hexadecimal digits in THINWIRE_TEST_FAULT.
"""

import importlib.abc
import importlib.util
import os
import pickle
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

LAST = "thinwire.tools.train.rank"
"""When it is loaded, so is all that a fault replaces."""


class InstallAfter(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != LAST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            pickle.loads(bytes.fromhex(os.environ["THINWIRE_TEST_FAULT"])).install(setattr)

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


if "THINWIRE_TEST_FAULT" in os.environ:
    sys.meta_path.insert(0, InstallAfter())
