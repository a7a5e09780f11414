"""The algorithms gather, sharded, values and hierarchical. Each gives a sum with the same bits on every rank."""
