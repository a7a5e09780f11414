"""The benchmarks behind `thinwire bench`: each beside its peers in the same run, with its conditions."""
