"""Optimizer steps of PyTorch whose work the ranks of a node share."""
