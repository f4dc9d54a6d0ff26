"""Gradients of TensorFlow variables, reduced over the ranks."""
