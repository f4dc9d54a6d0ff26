"""PyTorch tensors as buffers, their devices, and the streams that order work on them."""
