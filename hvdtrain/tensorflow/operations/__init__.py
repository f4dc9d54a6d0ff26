"""Horovod's operations on TensorFlow tensors."""
