"""Horovod's operations on PyTorch tensors, one module for each collective."""
