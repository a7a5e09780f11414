"""Adapters for frameworks that own the training loop. Each needs its package, which thinwire does not install."""
