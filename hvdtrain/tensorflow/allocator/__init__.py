"""An allocator that puts the gradients of TensorFlow into memory that the ranks of a node share."""
