"""Optimizer steps of Keras whose work the ranks of a node share."""
