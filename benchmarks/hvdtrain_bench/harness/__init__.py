"""The ranks of a benchmark, their turns, settings and results."""
