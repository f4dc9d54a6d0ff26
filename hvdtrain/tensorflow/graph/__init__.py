"""Calls from TensorFlow graphs into Python, in one order on all ranks."""
