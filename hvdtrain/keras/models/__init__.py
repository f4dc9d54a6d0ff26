"""Hooks of Keras models: what compile and fit do on several ranks."""
