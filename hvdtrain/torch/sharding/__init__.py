"""Optimizer steps of PyTorch whose work ranks share."""
