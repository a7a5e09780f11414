"""Plain torch operations, on any device: the specification of every payload, and the oracle of the tests.

Written to be read and to be right; the other backends are written to be fast. Besides `encode`, `commit` and `decode`
each module has `check(payload, layout)`, which raises ValueError for bytes that `encode` could not have made.
"""
