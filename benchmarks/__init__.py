"""Benchmarks: each measures thinwire and its alternatives in one run and records the conditions.

python -m benchmarks codec|link|recipe|results ...          # from the root of the repository
"""
