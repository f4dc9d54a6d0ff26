"""The algorithms that combine filled buckets, their names, and what several of them use."""
