"""Python functions as operations of TensorFlow graphs, in one order on all ranks."""
