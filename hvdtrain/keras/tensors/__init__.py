"""Tensors of Keras's backends, and the device of a rank."""
