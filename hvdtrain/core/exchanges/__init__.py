"""The algorithms that combine filled buckets, one file for each, and their names."""
