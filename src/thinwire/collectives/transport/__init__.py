"""How bytes get from rank to rank, and how ranks learn of what went wrong."""
