"""Memory that the ranks of a node share, and reductions in it."""
