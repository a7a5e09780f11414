"""How payloads become one sum with the same bits on every rank: gather, sharded, values, hierarchical."""
