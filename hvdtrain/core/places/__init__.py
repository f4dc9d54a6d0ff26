"""Gradients that are reduced where they lie, on each rank elsewhere."""
