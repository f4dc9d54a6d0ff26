"""Optimizers for large batches, and the choice of one by name."""
