"""An allocator that puts the gradients of PyTorch into memory that the ranks of a node share."""
