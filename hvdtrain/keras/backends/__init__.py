"""Distributed optimizers, and how gradients of each of Keras's backends are reduced."""
