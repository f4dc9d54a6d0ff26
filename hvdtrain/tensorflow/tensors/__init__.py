"""Tensors and devices of TensorFlow."""
