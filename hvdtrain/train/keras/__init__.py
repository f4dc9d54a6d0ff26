"""Training with Keras on its backends."""
