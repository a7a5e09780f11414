"""Plain torch operations on any device: the specification of every payload, which the tests compare with.

These modules are written to be clear and correct. The other backends are written to be fast. Besides `encode`, `commit`
and `decode`, the module of each layout has `check(payload, layout)`, which raises ValueError for bytes that `encode`
could not have written.
"""
