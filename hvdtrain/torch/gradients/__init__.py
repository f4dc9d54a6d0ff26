"""Gradients of PyTorch parameters, reduced during the backward pass."""
