"""Which samples each rank takes, and the seeds of what is random."""
