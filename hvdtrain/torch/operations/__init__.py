"""PyTorch tensors as buffers, and Horovod's operations on them."""
