"""Horovod's operations on PyTorch tensors."""
