"""Tensors of each framework as buffers, and pinning a device. One file per framework."""
