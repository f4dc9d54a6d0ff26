"""Horovod's operations on values and variables of Keras."""
