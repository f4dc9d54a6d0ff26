"""Gradients of TensorFlow variables, reduced over the ranks, and the optimizers that use them."""
