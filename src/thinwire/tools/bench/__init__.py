"""Benchmarks of `thinwire bench`. Each measures thinwire and its alternatives in one run and records the conditions."""
