"""One small training, by each framework's launcher and by a plain DDP loop: for tests and benchmarks/frameworks.py."""
