"""Functions that are called on every rank of a new job."""
