"""Memory shared by the ranks of a node, and reductions in it."""
