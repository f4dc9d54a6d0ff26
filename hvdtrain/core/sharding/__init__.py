"""Optimizer steps whose work the ranks of a node share."""
