"""PyTorch tensors as buffers, and the streams that order work on them."""
