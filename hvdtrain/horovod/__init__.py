"""Horovod itself: modules under its names, and its build."""
