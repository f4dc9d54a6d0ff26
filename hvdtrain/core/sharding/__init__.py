"""Optimizer steps whose work ranks share."""
